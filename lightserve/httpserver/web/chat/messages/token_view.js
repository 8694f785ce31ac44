// @ts-check
/** An answer token by token: coloured by probability, with the alternatives of the one under the pointer. */

import { element } from "../page/dom.js";

/**
 * @typedef {import("../conversations/conversations.js").Choice} Choice
 * @typedef {import("../conversations/conversations.js").Token} Token
 */

const LIKELY = [0.9, 0.6, 0.3, 0.1]; // classes likely-0 to likely-4, from the most probable tokens on

export class TokenView {
  /** @param {Token[]} tokens */
  constructor(tokens) {
    this._tokens = tokens;
    this._spans = tokens.map(tokenNode);
    this._chosen = -1;
    this._details = element("div", { class: "token-details", role: "status", hidden: true });
    const label = "Tokens of the answer. The arrow keys show the probability of each.";
    const attributes = { class: "tokens", tabindex: 0, role: "group", "aria-label": label };
    this._text = element("div", attributes, ...this._spans);
    this._text.addEventListener("pointerover", ({ target }) => this._choose(this._spans.indexOf(/** @type {any} */ (target))));
    this._text.addEventListener("pointerleave", () => this._choose(-1));
    this._text.addEventListener("blur", () => this._choose(-1));
    this._text.addEventListener("keydown", (event) => this._onKey(event));
    this.node = element("div", { class: "token-view" }, this._text, this._details);
  }

  /** @param {KeyboardEvent} event */
  _onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      this._choose(Math.min(Math.max(this._chosen + step, 0), this._spans.length - 1));
    }
  }

  /** @param {number} index -1: none */
  _choose(index) {
    this._spans[this._chosen]?.classList.remove("chosen");
    this._chosen = index;
    this._details.hidden = index === -1;
    if (index === -1) {
      return;
    }
    const span = this._spans[index];
    span.classList.add("chosen");
    this._details.replaceChildren(detailsNode(this._tokens[index]));
    this._details.style.top = `${span.offsetTop + span.offsetHeight + 4}px`;
    this._details.style.left = `${Math.max(0, Math.min(span.offsetLeft, this.node.clientWidth - this._details.offsetWidth))}px`;
  }
}

/** @param {Token} token */
function tokenNode({ token, logprob }) {
  const level = LIKELY.findIndex((least) => Math.exp(logprob) >= least);
  return element("span", { class: `likely-${level === -1 ? LIKELY.length : level}` }, token);
}

/** The token and its alternatives, the most probable first. @param {Token} token */
function detailsNode({ token, logprob, others }) {
  const rest = others.filter((other) => other.token !== token);
  const all = [{ token, logprob }, ...rest].sort((a, b) => b.logprob - a.logprob);
  const rows = all.map((choice) => {
    const isTaken = choice.token === token;
    const cells = [element("td", {}, element("code", {}, visible(choice.token))), element("td", {}, percent(choice.logprob))];
    return element("tr", { class: isTaken ? "taken" : null }, ...cells);
  });
  return element("table", {}, element("tbody", {}, ...rows));
}

/** A token with its spaces and line ends. @param {string} token */
function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(nothing)";
}

/** @param {number} logprob */
function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return `${value >= 1 ? value.toFixed(1) : value.toPrecision(1)} %`;
}
