// @ts-check
/** Commands of LaTeX by name: what they make of the arguments that follow them. */

import { mathElement } from "../page/dom.js";
import { fenced, functionNode, rowOf, space } from "./math_nodes.js";
import * as symbols from "./math_symbols.js";

/**
 * @typedef {import("./math.js").Parser} Parser
 * @typedef {(parser: Parser, name: string) => Element | null} Command null: it shows nothing
 */

const FENCES = /** @type {Record<string, [string, string]>} */ ({
  pmatrix: ["(", ")"],
  bmatrix: ["[", "]"],
  Bmatrix: ["{", "}"],
  vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"],
  cases: ["{", ""],
  rcases: ["", "}"],
});
const ALIGNED = /^(align|aligned|alignat|alignedat|split|eqnarray)\*?$/;

/** @type {Command} */
const text = (parser) => mathElement("mtext", {}, parser.rawArgument().replace(/^\s|\s$/g, "\u00a0"));
/** @type {Command} */
const boxed = (parser) => mathElement("mrow", { class: "math-box" }, parser.argument());
/** @type {Command} */
const modulo = () => mathElement("mo", { lspace: "0.28em", rspace: "0.28em" }, "mod");
/** @type {Command} */
const nothing = (parser) => {
  parser.rawArgument();
  return null;
};

/** @type {Map<string, Command>} */
const COMMANDS = new Map(
  Object.entries({
    ...{ text, textrm: text, textit: text, textnormal: text, mbox: text, tag: text, boxed, fbox: boxed },
    ...{ bmod: modulo, mod: modulo, color: nothing, label: nothing, hspace: nothing, vspace: nothing },
    ...{ left: fence, begin: environment, sqrt: root },
    operatorname: (parser) => functionNode(parser.rawArgument(), false),
    "operatorname*": (parser) => functionNode(parser.rawArgument(), true),
    overset: (parser) => stacked(parser, "mover"),
    stackrel: (parser) => stacked(parser, "mover"),
    underset: (parser) => stacked(parser, "munder"),
    middle: (parser) => mathElement("mo", { stretchy: "true" }, parser.delimiter()),
    not: (parser) => mathElement("mo", {}, `${parser.delimiter()}\u0338`),
    pmod: (parser) => fenced("(", [mathElement("mi", {}, "mod"), space("0.28em"), parser.argument()], ")"),
    phantom: (parser) => mathElement("mphantom", {}, parser.argument()),
  }),
);

/** @type {Command} */
export function runCommand(parser, name) {
  if (symbols.STYLES.has(name)) {
    return styledArgument(parser, symbols.STYLES.get(name) ?? "");
  }
  if (symbols.ACCENTS.has(name)) {
    const accent = mathElement("mo", { stretchy: String(name.length > 5) }, symbols.ACCENTS.get(name) ?? "");
    return mathElement("mover", { accent: "true" }, parser.argument(), accent);
  }
  if (symbols.UNDER.has(name)) {
    const line = mathElement("mo", { stretchy: "true" }, symbols.UNDER.get(name) ?? "");
    return mathElement("munder", {}, parser.argument(), line);
  }
  if (/^[dtc]?(frac|binom)$/.test(name)) {
    return fraction(parser, name);
  }
  if (symbols.IGNORED.has(name)) {
    return null;
  }
  if (symbols.SIZES.has(name)) {
    return sized(parser, name);
  }
  const command = COMMANDS.get(name);
  return command === undefined ? mathElement("mtext", { class: "math-unknown" }, `\\${name}`) : command(parser, name);
}

/**
 * @param {Parser} parser
 * @param {string} style
 */
function styledArgument(parser, style) {
  if (style === "upright" && parser.peek() === "{") {
    const name = parser.rawArgument().replaceAll("\\", "");
    return mathElement("mi", name.length === 1 ? { mathvariant: "normal" } : {}, name);
  }
  const before = parser.style;
  parser.style = style;
  const node = parser.argument();
  parser.style = before;
  return node;
}

/**
 * @param {Parser} parser
 * @param {string} name
 */
function fraction(parser, name) {
  const isBinomial = name.endsWith("binom");
  const node = mathElement("mfrac", isBinomial ? { linethickness: 0 } : {}, parser.argument(), parser.argument());
  const styled = "dt".includes(name[0])
    ? mathElement("mstyle", { displaystyle: String(name[0] === "d") }, node)
    : node;
  return isBinomial ? fenced("(", [styled], ")") : styled;
}

/** @param {Parser} parser */
function root(parser) {
  const index = parser.option();
  const radicand = parser.argument();
  return index === null ? mathElement("msqrt", {}, radicand) : mathElement("mroot", {}, radicand, rowOf(index));
}

/**
 * @param {Parser} parser
 * @param {"mover" | "munder"} tag
 */
function stacked(parser, tag) {
  const script = parser.argument();
  return mathElement(tag, {}, parser.argument(), script);
}

/**
 * @param {Parser} parser
 * @param {string} name
 */
function sized(parser, name) {
  const minsize = name.includes("gg") ? "2.4em" : name.startsWith("B") ? "1.8em" : "1.2em";
  return mathElement("mo", { stretchy: "true", minsize }, parser.delimiter());
}

/** From \left to \right. @param {Parser} parser @returns {Element} */
function fence(parser) {
  const open = parser.delimiter();
  /** @type {Element[]} */
  const nodes = [];
  parser.nested(() => {
    while (!["", "}", "\\right", "\\end"].includes(parser.peek())) {
      nodes.push(...parser.row([]));
      if (["&", "\\\\"].includes(parser.peek())) {
        parser.next();
      }
    }
  });
  return fenced(open, nodes, parser.take("\\right") ? parser.delimiter() : "");
}

/** From \begin to \end. @param {Parser} parser @returns {Element} */
function environment(parser) {
  const name = parser.rawArgument().replace("*", "");
  if (["array", "alignat", "alignedat"].includes(name)) {
    parser.rawArgument(); // the columns
  }
  /** @type {Element[]} */
  let rows = [];
  parser.nested(() => (rows = gridRows(parser)));
  if (parser.take("\\end")) {
    parser.rawArgument();
  }
  const isAligned = ALIGNED.test(name);
  const kind = name.endsWith("cases") ? "math-cases" : isAligned ? "math-aligned" : null;
  const grid = mathElement("mtable", { class: kind, displaystyle: isAligned ? "true" : null }, ...rows);
  const [open, close] = FENCES[name] ?? ["", ""];
  return open || close ? fenced(open, [grid], close) : grid;
}

/** @param {Parser} parser */
function gridRows(parser) {
  /** @type {Element[][]} */
  const rows = [[]];
  while (!["", "\\end"].includes(parser.peek())) {
    rows[rows.length - 1].push(mathElement("mtd", {}, ...parser.row([])));
    if (parser.take("\\\\")) {
      parser.option(); // the space after a row, as in \\[2pt]
      rows.push([]);
    } else if (parser.peek() !== "\\end") {
      parser.next(); // &, or a bracket out of place
    }
  }
  return rows.filter((cells) => cells.length > 0).map((cells) => mathElement("mtr", {}, ...cells));
}
