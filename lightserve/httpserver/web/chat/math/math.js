// @ts-check
/** LaTeX formulas as MathML, which browsers lay out: the usual part of it. What is not known is shown as it is written. */

import { mathElement } from "../page/dom.js";
import { runCommand } from "./math_commands.js";
import { attach, fenced, functionNode, rowOf, space, styledText } from "./math_nodes.js";
import * as symbols from "./math_symbols.js";

const TOKEN = /\\[A-Za-z]+\*?|\\[^]|[^\s]/gu;
const CLOSING = ["}", "&", "\\\\", "\\right", "\\end"];
const LIMITS_BESIDES = ["\\underbrace", "\\overbrace", "\\operatorname*"];
const MAX_DEPTH = 40; // of groups; what is deeper is left out
export const MAX_FORMULA = 5000; // characters; longer ones stay text

/**
 * @param {string} text
 * @param {boolean} isBlock
 * @returns {Element}
 */
export function formulaNode(text, isBlock) {
  const attributes = { display: isBlock ? "block" : "inline", alttext: text };
  return mathElement("math", attributes, rowOf(new Parser(text).parse()));
}

export class Parser {
  /** @param {string} text */
  constructor(text) {
    this.style = ""; // of STYLES
    this._text = text;
    this._matches = [...text.matchAll(TOKEN)];
    this._at = 0;
    this._depth = 0;
  }

  parse() {
    const nodes = [];
    while (this.peek() !== "") {
      nodes.push(...this.row([]));
      this.next(); // a bracket, & or \\ that closes nothing
    }
    return nodes;
  }

  /** The next token, which stays; "" at the end. */
  peek() {
    return this._matches[this._at]?.[0] ?? "";
  }

  next() {
    this._at += 1;
    return this._matches[this._at - 1]?.[0] ?? "";
  }

  /** Whether this was the next token, which is taken then. @param {string} token */
  take(token) {
    const isNext = this.peek() === token;
    this._at += isNext ? 1 : 0;
    return isNext;
  }

  /** Runs it one level deeper; beyond MAX_DEPTH the rest of the formula is left out. @param {() => void} parse */
  nested(parse) {
    if (this._depth >= MAX_DEPTH) {
      this._at = this._matches.length;
      return;
    }
    this._depth += 1;
    parse();
    this._depth -= 1;
  }

  /**
   * Nodes up to one of these tokens, or to one that closes something around it; that token is not taken.
   *
   * @param {string[]} ends
   * @returns {Element[]}
   */
  row(ends) {
    const nodes = [];
    for (;;) {
      const token = this.peek();
      if (token === "" || ends.includes(token) || CLOSING.includes(token)) {
        return nodes;
      }
      if (token === "\\over" || token === "\\choose") {
        return [this._fractionOfRow(nodes, ends)];
      }
      const node = this._withScripts();
      if (node !== null) {
        nodes.push(node);
      }
    }
  }

  /**
   * @param {Element[]} above
   * @param {string[]} ends
   * @returns {Element}
   */
  _fractionOfRow(above, ends) {
    const isBinomial = this.next() === "\\choose";
    /** @type {Element[]} */
    let below = [];
    this.nested(() => (below = this.row(ends)));
    const fraction = mathElement("mfrac", isBinomial ? { linethickness: 0 } : {}, rowOf(above), rowOf(below));
    return isBinomial ? fenced("(", [fraction], ")") : fraction;
  }

  /** One atom with what is below and above it. @returns {Element | null} null: it shows nothing */
  _withScripts() {
    const token = this.peek();
    const name = token.slice(1);
    const hasLimits = symbols.LARGE.has(name) || symbols.LIMITS.has(name) || LIMITS_BESIDES.includes(token);
    const base = "^_'".includes(token) ? mathElement("mrow") : this._atom();
    if (base === null) {
      return null;
    }
    /** @type {{sub: Element | null, sup: Element | null}} */
    const scripts = { sub: null, sup: null };
    while (this._addScript(scripts)) {}
    return attach(base, scripts, hasLimits);
  }

  /**
   * Whether a script was next.
   *
   * @param {{sub: Element | null, sup: Element | null}} scripts
   */
  _addScript(scripts) {
    const token = this.peek();
    if (token === "\\limits" || token === "\\nolimits") {
      this.next();
      return true;
    }
    if (token !== "'" && token !== "^" && token !== "_") {
      return false;
    }
    const name = token === "_" ? "sub" : "sup";
    const before = scripts[name];
    const script = token === "'" ? this._primes() : (this.next(), this.argument());
    scripts[name] = before === null ? script : rowOf([before, script]);
    return true;
  }

  _primes() {
    let text = "";
    while (this.take("'")) {
      text += "′";
    }
    return mathElement("mo", {}, text);
  }

  /** @returns {Element | null} null: it shows nothing */
  _atom() {
    const token = this.next();
    if (token === "{") {
      return this._group();
    }
    if (/^[0-9]$/.test(token)) {
      return this._number(token);
    }
    if (token.length > 1 && token.startsWith("\\")) {
      return this._symbol(token.slice(1)) ?? runCommand(this, token.slice(1));
    }
    return this._character(token);
  }

  /** @param {string} token */
  _character(token) {
    if (token === "~") {
      return space("0.33em");
    }
    if (/^\p{L}$/u.test(token)) {
      return mathElement("mi", this._upright(), styledText(token, this.style));
    }
    const shown = token === "-" ? "−" : token === "*" ? "∗" : token;
    return mathElement("mo", "()[]|".includes(token) ? { stretchy: "false" } : {}, shown);
  }

  _upright() {
    return this.style === "upright" ? { mathvariant: "normal" } : {};
  }

  /** @param {string} first */
  _number(first) {
    let text = first;
    while (/^[0-9.]$/.test(this.peek()) && this._isNextTo()) {
      text += this.next();
    }
    return mathElement("mn", {}, styledText(text, this.style));
  }

  /** Whether no space is before the next token. */
  _isNextTo() {
    return this._matches[this._at].index === this._matches[this._at - 1].index + 1;
  }

  /** @returns {Element} */
  _group() {
    /** @type {Element[]} */
    const nodes = [];
    this.nested(() => {
      while (!["", "}"].includes(this.peek())) {
        nodes.push(...this.row([]));
        if (this.peek() !== "}") {
          this.next(); // & or \\ out of place
        }
      }
    });
    this.next();
    return rowOf(nodes);
  }

  /** A group, or one token: \frac12 has two. @returns {Element} */
  argument() {
    const token = this.peek();
    if (token === "" || CLOSING.includes(token)) {
      return mathElement("mrow");
    }
    if (/^[0-9]$/.test(token)) {
      return mathElement("mn", {}, styledText(this.next(), this.style));
    }
    /** @type {Element | null} */
    let node = null;
    this.nested(() => (node = this._atom()));
    return node ?? mathElement("mrow");
  }

  /** The text of a group as it is written. */
  rawArgument() {
    if (this.peek() !== "{") {
      return this.next();
    }
    const begin = this._matches[this._at].index + 1;
    this.next();
    let open = 1;
    while (open > 0 && this.peek() !== "") {
      const token = this.next();
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
    }
    return this._text.slice(begin, open === 0 ? this._matches[this._at - 1].index : this._text.length);
  }

  /** What is in [brackets], if they are next. @returns {Element[] | null} */
  option() {
    if (!this.take("[")) {
      return null;
    }
    /** @type {Element[]} */
    let nodes = [];
    this.nested(() => (nodes = this.row(["]"])));
    this.take("]");
    return nodes;
  }

  /** A bracket, or the operator of a command; "" for a dot. */
  delimiter() {
    const token = this.next();
    const shown = token.startsWith("\\") ? (symbols.OPERATORS.get(token.slice(1)) ?? "") : token;
    return { ".": "", "<": "⟨", ">": "⟩" }[shown] ?? shown;
  }

  /** @param {string} name @returns {Element | null} null: it is none */
  _symbol(name) {
    const { LETTERS, LARGE, OPERATORS, INTEGRALS, FUNCTIONS, LIMITS, SPACES } = symbols;
    if (LETTERS.has(name)) {
      const isUpright = /^[A-Z]/.test(name) || this.style === "upright";
      return mathElement("mi", isUpright ? { mathvariant: "normal" } : {}, LETTERS.get(name) ?? "");
    }
    if (LARGE.has(name)) {
      return mathElement("mo", { movablelimits: "true" }, LARGE.get(name) ?? "");
    }
    const operator = OPERATORS.get(name) ?? INTEGRALS.get(name);
    if (operator !== undefined) {
      return mathElement("mo", {}, operator);
    }
    if (FUNCTIONS.has(name) || LIMITS.has(name)) {
      return functionNode(name.replace(/^(lim|arg)(sup|inf|max|min)$/, "$1 $2"), LIMITS.has(name));
    }
    return SPACES.has(name) ? space(SPACES.get(name) ?? "") : null;
  }
}
