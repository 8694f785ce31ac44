// @ts-check
/** Splits Markdown into blocks. Half of a block, as at the end of a stream, is a block too. */

/**
 * @typedef {"left" | "center" | "right" | null} Align
 *
 * @typedef {{kind: "paragraph", text: string}
 *   | {kind: "heading", level: number, text: string}
 *   | {kind: "code", language: string, text: string}
 *   | {kind: "quote", blocks: Block[]}
 *   | {kind: "list", isOrdered: boolean, start: number, items: Item[]}
 *   | {kind: "formula", text: string}
 *   | {kind: "table", head: string[], align: Align[], rows: string[][]}
 *   | {kind: "rule"}} Block
 *
 * @typedef {{isDone: boolean | null, blocks: Block[]}} Item isDone is null unless the list is one of tasks
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)(.*)$/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const FORMULA = /^ {0,3}(\$\$|\\\[|\\begin\{(?:equation|align|gather|multline)\*?\})(.*)$/;
const TASK = /^\[([ xX])\][ \t]+/;
const MAX_TABLE_RULE = 1000; // characters: bounds the time for TABLE_RULE
const MAX_FORMULA_LINES = 100;
const MAX_DEPTH = 12; // deeper quotes and lists stay text

/**
 * @param {string} text
 * @param {number} [depth]
 * @returns {Block[]}
 */
export function parseBlocks(text, depth = 0) {
  const lines = new Lines(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"));
  /** @type {Block[]} */
  const blocks = [];
  while (!lines.isAtEnd) {
    if (lines.current.trim() === "") {
      lines.next();
    } else {
      blocks.push(parseBlock(lines, depth));
    }
  }
  return blocks;
}

class Lines {
  /** @param {string[]} lines */
  constructor(lines) {
    this._lines = lines;
    this._index = 0;
  }

  get isAtEnd() {
    return this._index >= this._lines.length;
  }

  get current() {
    return this._lines[this._index];
  }

  /** The line after the current one, "" at the end. */
  get following() {
    return this._lines[this._index + 1] ?? "";
  }

  /** The line so many after the current one, "" beyond the end. @param {number} count */
  ahead(count) {
    return this._lines[this._index + count] ?? "";
  }

  /** @param {number} count */
  skip(count) {
    this._index += count;
  }

  next() {
    this._index += 1;
    return this._lines[this._index - 1];
  }

  /** Takes lines as long as they match. @param {(line: string) => boolean} matches */
  takeWhile(matches) {
    const taken = [];
    while (!this.isAtEnd && matches(this.current)) {
      taken.push(this.next());
    }
    return taken;
  }
}

/**
 * @param {Lines} lines
 * @param {number} depth
 * @returns {Block}
 */
function parseBlock(lines, depth) {
  const line = lines.current;
  const heading = HEADING.exec(line);
  if (heading !== null) {
    lines.next();
    return { kind: "heading", level: heading[1].length, text: trimHashes(heading[2] ?? "") };
  }
  if (FENCE.test(line)) {
    return parseCode(lines);
  }
  if (RULE.test(line)) {
    lines.next();
    return { kind: "rule" };
  }
  const formula = formulaAt(lines);
  if (formula !== null) {
    lines.skip(formula.count);
    return { kind: "formula", text: formula.text };
  }
  if (QUOTE.test(line) && depth < MAX_DEPTH) {
    const quoted = lines.takeWhile((one) => QUOTE.test(one)).map((one) => QUOTE.exec(one)?.[1] ?? "");
    return { kind: "quote", blocks: parseBlocks(quoted.join("\n"), depth + 1) };
  }
  if (ITEM.test(line) && depth < MAX_DEPTH) {
    return parseList(lines, depth);
  }
  if (isTableStart(lines)) {
    return parseTable(lines);
  }
  const first = lines.next(); // always taken, or a line beyond MAX_DEPTH would never be
  const rest = lines.takeWhile((one) => one.trim() !== "" && !startsBlock(lines));
  return { kind: "paragraph", text: [first, ...rest].map((one) => one.trimStart()).join("\n") };
}

/**
 * A formula that begins here and ends at the end of a line, else null: then it is part of a paragraph.
 *
 * @param {Lines} lines
 */
function formulaAt(lines) {
  const found = FORMULA.exec(lines.current);
  if (found === null) {
    return null;
  }
  const [, open, first] = found;
  const close = open === "$$" ? "$$" : open === "\\[" ? "\\]" : open.replace("begin", "end");
  const texts = [first];
  while (!lastOf(texts).trimEnd().endsWith(close)) {
    const line = lines.ahead(texts.length);
    if (line.trim() === "" || lastOf(texts).includes(close) || texts.length === MAX_FORMULA_LINES) {
      return null;
    }
    texts.push(line);
  }
  const text = texts.join("\n").trimEnd().slice(0, -close.length);
  return { text: open.length === 2 ? text : open + text + close, count: texts.length };
}

/** @param {string[]} texts */
function lastOf(texts) {
  return texts[texts.length - 1];
}

/** Whether the current line ends the paragraph before it. @param {Lines} lines */
function startsBlock(lines) {
  return [HEADING, FENCE, RULE, QUOTE, ITEM].some((pattern) => pattern.test(lines.current)) || formulaAt(lines) !== null;
}

/** @param {string} text */
function trimHashes(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") {
    end -= 1;
  }
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trimEnd() : trimmed;
}

/**
 * @param {Lines} lines
 * @returns {Block}
 */
function parseCode(lines) {
  const [, fence, info] = /** @type {RegExpExecArray} */ (FENCE.exec(lines.next()));
  const body = lines.takeWhile((line) => {
    const end = line.trim();
    return !(end.startsWith(fence) && end === fence[0].repeat(end.length));
  });
  if (!lines.isAtEnd) {
    lines.next(); // the closing fence
  }
  return { kind: "code", language: info.trim().split(/\s/)[0], text: body.join("\n") };
}

/**
 * @param {Lines} lines
 * @param {number} depth
 * @returns {Block}
 */
function parseList(lines, depth) {
  const marker = /** @type {RegExpExecArray} */ (ITEM.exec(lines.current))[2];
  const isOrdered = /\d/.test(marker);
  const items = [];
  while (!lines.isAtEnd && !RULE.test(lines.current) && isItemOf(lines.current, isOrdered)) {
    items.push(itemOf(takeItem(lines), depth));
  }
  return { kind: "list", isOrdered, start: isOrdered ? Number.parseInt(marker, 10) : 1, items };
}

/**
 * @param {string} text
 * @param {number} depth
 * @returns {Item}
 */
function itemOf(text, depth) {
  const task = TASK.exec(text);
  const blocks = parseBlocks(task === null ? text : text.slice(task[0].length), depth + 1);
  return { isDone: task === null ? null : task[1] !== " ", blocks };
}

/**
 * @param {string} line
 * @param {boolean} isOrdered
 */
function isItemOf(line, isOrdered) {
  const found = ITEM.exec(line);
  return found !== null && /\d/.test(found[2]) === isOrdered;
}

/**
 * The text of one item: its first line, and the lines that belong to it by indentation.
 *
 * @param {Lines} lines
 */
function takeItem(lines) {
  const [, indent, marker, space, first] = /** @type {RegExpExecArray} */ (ITEM.exec(lines.next()));
  const width = indent.length + marker.length + Math.min(Math.max(space.length, 1), 4);
  const taken = [first];
  const isContinuation = (/** @type {string} */ line) => line.search(/\S/) >= Math.min(width, indent.length + 2);
  while (!lines.isAtEnd) {
    const line = lines.current;
    if (line.trim() === "") {
      if (!isContinuation(lines.following)) {
        skipBlankBeforeItem(lines);
        break;
      }
      taken.push("");
    } else if (isContinuation(line)) {
      taken.push(line.slice(Math.min(width, line.search(/\S/))));
    } else if (startsBlock(lines)) {
      break;
    } else {
      taken.push(line); // the paragraph goes on without indentation
    }
    lines.next();
  }
  return taken.join("\n");
}

/** A blank line between two items does not end the list. @param {Lines} lines */
function skipBlankBeforeItem(lines) {
  if (ITEM.test(lines.following)) {
    lines.next();
  }
}

/** @param {Lines} lines */
function isTableStart(lines) {
  const [head, rule] = [lines.current, lines.following];
  const isRule = rule.includes("-") && rule.length < MAX_TABLE_RULE && TABLE_RULE.test(rule);
  return isRule && head.includes("|") && cells(head).length === cells(rule).length;
}

/**
 * @param {Lines} lines
 * @returns {Block}
 */
function parseTable(lines) {
  const head = cells(lines.next());
  const align = cells(lines.next()).map(alignOf);
  const rows = lines.takeWhile((line) => line.includes("|") && line.trim() !== "").map(cells);
  return { kind: "table", head, align, rows: rows.map((row) => head.map((_, index) => row[index] ?? "")) };
}

/** @param {string} line */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/**
 * @param {string} rule
 * @returns {Align}
 */
function alignOf(rule) {
  const [isLeft, isRight] = [rule.startsWith(":"), rule.endsWith(":")];
  return isRight ? (isLeft ? "center" : "right") : isLeft ? "left" : null;
}
