// @ts-check
/** Parts of formulas as MathML. */

import { mathElement } from "../page/dom.js";
import { styled } from "./math_symbols.js";

/**
 * @param {Element} base
 * @param {{sub: Element | null, sup: Element | null}} scripts
 * @param {boolean} hasLimits they stand below and above it
 */
export function attach(base, { sub, sup }, hasLimits) {
  if (sub !== null && sup !== null) {
    return mathElement(hasLimits ? "munderover" : "msubsup", {}, base, sub, sup);
  }
  if (sub !== null) {
    return mathElement(hasLimits ? "munder" : "msub", {}, base, sub);
  }
  return sup === null ? base : mathElement(hasLimits ? "mover" : "msup", {}, base, sup);
}

/** @param {Element[]} nodes */
export function rowOf(nodes) {
  return nodes.length === 1 ? nodes[0] : mathElement("mrow", {}, ...nodes);
}

/**
 * @param {string} open
 * @param {Element[]} nodes
 * @param {string} close
 */
export function fenced(open, nodes, close) {
  const fence = (/** @type {string} */ text, /** @type {string} */ form) =>
    text === "" ? [] : [mathElement("mo", { fence: "true", stretchy: "true", form }, text)];
  return mathElement("mrow", {}, ...fence(open, "prefix"), ...nodes, ...fence(close, "postfix"));
}

/**
 * @param {string} name
 * @param {boolean} hasLimits
 */
export function functionNode(name, hasLimits) {
  return mathElement("mo", { movablelimits: hasLimits ? "true" : null, rspace: "0.17em", lspace: "0.17em" }, name);
}

/** @param {string} width */
export function space(width) {
  return mathElement("mspace", { width });
}

/**
 * @param {string} text
 * @param {string} style
 */
export function styledText(text, style) {
  return [...text].map((character) => styled(character, style)).join("");
}
