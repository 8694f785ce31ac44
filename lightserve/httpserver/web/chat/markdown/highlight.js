// @ts-check
/** Colours for code: comments, strings, numbers, keywords, calls and names of values, by a scanner for each language. */

import { element } from "../page/dom.js";
import { languageOf } from "./languages.js";

const MAX_CHARACTERS = 30_000; // longer code has one colour: it is built anew while an answer grows

/**
 * The nodes of this code. Text of a language that is not known stays one string.
 *
 * @param {string} language as after the fence of a code block
 * @param {string} text
 * @returns {(Node | string)[]}
 */
export function highlight(language, text) {
  const found = languageOf(language);
  if (found === null || text.length > MAX_CHARACTERS) {
    return [text];
  }
  /** @type {(Node | string)[]} */
  const nodes = [];
  let plain = 0; // where the text without a colour begins
  for (const match of text.matchAll(found.pattern)) {
    const kind = kindOf(match, found.keywords);
    if (kind !== null) {
      nodes.push(text.slice(plain, match.index), element("span", { class: `code-${kind}` }, match[0]));
      plain = match.index + match[0].length;
    }
  }
  nodes.push(text.slice(plain));
  return nodes.filter((node) => node !== "");
}

/**
 * @param {RegExpMatchArray} match
 * @param {(word: string) => boolean} isKeyword
 * @returns {string | null} null: it has no colour
 */
function kindOf(match, isKeyword) {
  const groups = match.groups ?? {};
  if (groups.word === undefined) {
    return Object.keys(groups).find((name) => groups[name] !== undefined) ?? null;
  }
  const text = match.input ?? "";
  return isKeyword(groups.word) ? "keyword" : text[match.index + groups.word.length] === "(" ? "call" : null;
}
