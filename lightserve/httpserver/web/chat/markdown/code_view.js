// @ts-check
/** Code and JSON on the page, with a button that copies them. */

import { copyButton, element } from "../page/dom.js";
import { highlight } from "./highlight.js";

/**
 * Code with its language and a button that copies it.
 *
 * @param {string} language
 * @param {string} text
 */
export function codeNode(language, text) {
  const bar = element("div", { class: "code-bar" }, element("span", {}, language), copyButton(() => text));
  const code = element("code", {}, ...highlight(language, text));
  const label = language ? `Code, ${language}` : "Code";
  return element("div", { class: "code" }, bar, element("pre", { tabindex: 0, role: "group", "aria-label": label }, code));
}

/** JSON with indentation; half of a document, as in a stream, stays as it is. @param {string} text */
export function jsonNode(text) {
  return codeNode("json", indentJson(text));
}

/** @param {string} text */
function indentJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
