// @ts-check
/** Inline Markdown as DOM nodes: emphasis, code, links, formulas. HTML in the text stays text. */

import { element } from "../page/dom.js";
import { MAX_FORMULA, formulaNode } from "../math/math.js";

const SPECIAL = /[\\`*_~[\]!<$\n]|https?:\/\//g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const BARE_URL = /^https?:\/\/[^\s<>"'`]+/;
const AFTER_URL = ".,;:!?*_~)]"; // at the end of a bare address: most likely of the sentence around it
// The address is not empty, so only one part of the pattern can take each space: it never tries them in all ways.
const LINK = /^\[([^[\]]{0,500})\]\(\s*<?([^\s()<>]+(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]{0,500}")?\s*\)/;
const AMOUNT = /^\d[\d.,]*\s+[A-Za-z]{2}/; // of money, and words after it
const MAX_LINK = 2000; // characters; bounds the time for a text full of brackets
const MAX_DEPTH = 6;
/** @type {[string, "strong" | "em" | "del"][]} */
const EMPHASIS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/**
 * @param {string} text
 * @param {number} [depth]
 * @returns {Node[]}
 */
export function inlineNodes(text, depth = 0) {
  /** @type {Node[]} */
  const nodes = [];
  const markers = new MarkerSearch(text);
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain !== "") {
      nodes.push(document.createTextNode(plain));
      plain = "";
    }
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at < text.length) {
      const found = depth < MAX_DEPTH ? spanAt(text, at, depth, markers) : null;
      if (found === null) {
        plain += text[at];
        at += 1;
      } else if (typeof found.node === "string") {
        plain += found.node;
        at = found.end;
      } else {
        flush();
        nodes.push(found.node);
        at = found.end;
      }
    }
  }
  flush();
  return nodes;
}

/** Finds closing markers. It remembers the last one of each kind: a text full of markers takes linear time. */
class MarkerSearch {
  /** @param {string} text */
  constructor(text) {
    this._text = text;
    /** @type {Map<string, number>} */
    this._last = new Map();
  }

  /**
   * The first position from `from` on where `marker` closes a span, else -1.
   *
   * @param {string} marker
   * @param {number} from never before that of an earlier search
   * @param {(at: number) => boolean} closes
   */
  find(marker, from, closes = () => true) {
    const last = this._last.get(marker);
    if (last !== undefined && (last === -1 || last >= from)) {
      return last;
    }
    let found = this._text.indexOf(marker, from);
    while (found !== -1 && !closes(found)) {
      found = this._text.indexOf(marker, found + 1);
    }
    this._last.set(marker, found);
    return found;
  }
}

/**
 * @typedef {{node: Node | string, end: number}} Span a node, or text without its escape
 *
 * @param {string} text
 * @param {number} at
 * @param {number} depth
 * @param {MarkerSearch} markers
 * @returns {Span | null}
 */
function spanAt(text, at, depth, markers) {
  switch (text[at]) {
    case "\\":
      return bracketFormulaAt(text, at, markers) ?? escapeAt(text, at);
    case "$":
      return dollarFormulaAt(text, at, markers);
    case "\n":
      return { node: element("br"), end: at + 1 };
    case "`":
      return codeAt(text, at, markers);
    case "!":
      return text[at + 1] === "[" ? linkAt(text, at + 1, depth) : null; // an image is a link: nothing is loaded
    case "[":
      return linkAt(text, at, depth);
    case "<":
      return angleLinkAt(text, at);
    case "h":
      return bareLinkAt(text, at);
    default:
      return emphasisAt(text, at, depth, markers);
  }
}

/**
 * @param {string} text
 * @param {number} at
 * @returns {Span | null}
 */
function escapeAt(text, at) {
  const next = text[at + 1] ?? "";
  return ESCAPABLE.test(next) ? { node: next, end: at + 2 } : null;
}

/**
 * A formula between \\( and \\) or \\[ and \\].
 *
 * @param {string} text
 * @param {number} at
 * @param {MarkerSearch} markers
 * @returns {Span | null}
 */
function bracketFormulaAt(text, at, markers) {
  const close = { "(": "\\)", "[": "\\]" }[text[at + 1]];
  const end = close === undefined ? -1 : markers.find(close, at + 2);
  return end === -1 ? null : formulaSpan(text, at + 2, end, 2);
}

/**
 * A formula between $ and $, or $$ and $$. Amounts of money are none: "$5 and $10".
 *
 * @param {string} text
 * @param {number} at
 * @param {MarkerSearch} markers
 * @returns {Span | null}
 */
function dollarFormulaAt(text, at, markers) {
  const marker = text.startsWith("$$", at) ? "$$" : "$";
  const start = at + marker.length;
  const canOpen = marker === "$$" || !/\s/.test(text[start] ?? " ");
  const end = canOpen ? markers.find(marker, start + 1, (position) => text[position - 1] !== "\\") : -1;
  const isFormula = end !== -1 && (marker === "$$" || (closesFormula(text, end) && !AMOUNT.test(text.slice(start, end))));
  return isFormula ? formulaSpan(text, start, end, marker.length) : { node: marker, end: start };
}

/**
 * @param {string} text
 * @param {number} at
 */
function closesFormula(text, at) {
  return !/\s/.test(text[at - 1]) && !/[\d$]/.test(text[at + 1] ?? "");
}

/**
 * @param {string} text
 * @param {number} start
 * @param {number} end
 * @param {number} markerLength
 * @returns {Span | null}
 */
function formulaSpan(text, start, end, markerLength) {
  const isBlock = markerLength === 2 && text[start - 1] !== "(";
  const formula = text.slice(start, end);
  const isShort = formula.length <= MAX_FORMULA && formula.trim() !== "";
  return isShort ? { node: formulaNode(formula, isBlock), end: end + markerLength } : null;
}

/**
 * @param {string} text
 * @param {number} at
 * @param {MarkerSearch} markers
 * @returns {Span | null}
 */
function codeAt(text, at, markers) {
  let start = at;
  while (text[start] === "`") {
    start += 1;
  }
  const fence = text.slice(at, start);
  const end = markers.find(fence, start + 1);
  if (end === -1) {
    return { node: fence, end: start };
  }
  const code = text.slice(start, end).replaceAll("\n", " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
  return { node: element("code", {}, isPadded ? code.slice(1, -1) : code), end: end + fence.length };
}

/**
 * @param {string} text
 * @param {number} at
 * @param {number} depth
 * @returns {Span | null}
 */
function linkAt(text, at, depth) {
  const match = LINK.exec(text.slice(at, at + MAX_LINK));
  const url = match === null ? null : safeUrl(match[2]);
  if (match === null || url === null) {
    return null;
  }
  return { node: link(url, inlineNodes(match[1] || match[2], depth + 1)), end: at + match[0].length };
}

/**
 * @param {string} text
 * @param {number} at
 * @returns {Span | null}
 */
function angleLinkAt(text, at) {
  const match = /^<(https?:\/\/[^\s<>]+)>/.exec(text.slice(at, at + MAX_LINK));
  const url = match === null ? null : safeUrl(match[1]);
  return match === null || url === null
    ? null
    : { node: link(url, [document.createTextNode(match[1])]), end: at + match[0].length };
}

/**
 * @param {string} text
 * @param {number} at
 * @returns {Span | null}
 */
function bareLinkAt(text, at) {
  const match = BARE_URL.exec(text.slice(at, at + MAX_LINK));
  const found = match === null ? "" : withoutEnd(match[0], AFTER_URL);
  const url = safeUrl(found);
  return url === null ? null : { node: link(url, [document.createTextNode(found)]), end: at + found.length };
}

/**
 * @param {string} text
 * @param {string} characters those that are removed
 */
function withoutEnd(text, characters) {
  let end = text.length;
  while (end > 0 && characters.includes(text[end - 1])) {
    end -= 1;
  }
  return text.slice(0, end);
}

/**
 * @param {string} text
 * @param {number} at
 * @param {number} depth
 * @param {MarkerSearch} markers
 * @returns {Span | null}
 */
function emphasisAt(text, at, depth, markers) {
  const [marker, tag] = EMPHASIS.find(([one]) => text.startsWith(one, at)) ?? [null, null];
  if (marker === null || tag === null) {
    return null;
  }
  const start = at + marker.length;
  const isInWord = marker[0] === "_" && /\w/.test(text[at - 1] ?? "");
  const canOpen = !isInWord && !/\s/.test(text[start] ?? " ");
  const end = canOpen ? markers.find(marker, start + 1, (position) => closesEmphasis(text, position, marker)) : -1;
  if (end === -1) {
    return { node: marker, end: start };
  }
  return { node: element(tag, {}, ...inlineNodes(text.slice(start, end), depth + 1)), end: end + marker.length };
}

/**
 * @param {string} text
 * @param {number} at
 * @param {string} marker
 */
function closesEmphasis(text, at, marker) {
  const [before, after] = [text[at - 1], text[at + marker.length] ?? ""];
  const isHalf = marker.length === 1 && (after === marker || before === marker);
  const isInWord = marker[0] === "_" && /\w/.test(after);
  return !isHalf && !isInWord && before !== "\\" && !/\s/.test(before);
}

/** An absolute address of the web, else null: no javascript:, no data:, nothing of this server. @param {string} text */
function safeUrl(text) {
  if (!/^https?:\/\//i.test(text) || !URL.canParse(text)) {
    return null;
  }
  const url = new URL(text);
  return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
}

/**
 * @param {string} url of safeUrl
 * @param {Node[]} children
 */
function link(url, children) {
  return element("a", { href: url, title: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
