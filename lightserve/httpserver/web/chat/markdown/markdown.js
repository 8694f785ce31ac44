// @ts-check
/** Markdown as DOM nodes. While an answer grows, only the blocks that changed are built again. */

import { codeNode } from "./code_view.js";
import { element } from "../page/dom.js";
import { parseBlocks } from "./markdown_blocks.js";
import { inlineNodes } from "./markdown_inline.js";
import { MAX_FORMULA, formulaNode } from "../math/math.js";

/** @typedef {import("./markdown_blocks.js").Block} Block */

const SHOWN_HEADINGS = /** @type {const} */ (["h3", "h4", "h5", "h6", "h6", "h6"]); // h1 and h2 belong to the page

export class MarkdownView {
  /** @param {HTMLElement} container */
  constructor(container) {
    this._container = container;
    /** @type {string[]} */
    this._shown = []; // of each block: its JSON, to see whether it changed
  }

  /** @param {string} text */
  show(text) {
    const blocks = parseBlocks(text);
    const keys = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this._shown[same]) {
      same += 1;
    }
    while (this._container.childNodes.length > same) {
      this._container.lastChild?.remove();
    }
    this._container.append(...blocks.slice(same).map(blockNode));
    this._shown = keys;
  }
}

/**
 * @param {Block} block
 * @returns {Node}
 */
function blockNode(block) {
  switch (block.kind) {
    case "paragraph":
      return element("p", {}, ...inlineNodes(block.text));
    case "heading":
      return element(SHOWN_HEADINGS[block.level - 1], {}, ...inlineNodes(block.text));
    case "code":
      return codeNode(block.language, block.text);
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(blockNode));
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    case "formula":
      return blockFormulaNode(block.text);
    case "rule":
      return element("hr");
  }
}

/** @param {Extract<Block, {kind: "list"}>} block */
function listNode({ isOrdered, start, items }) {
  const list = element(isOrdered ? "ol" : "ul", isOrdered && start !== 1 ? { start } : {});
  list.append(...items.map(itemElement));
  return list;
}

/** @param {import("./markdown_blocks.js").Item} item */
function itemElement({ isDone, blocks }) {
  if (isDone === null) {
    return element("li", {}, ...blocks.map(itemNode));
  }
  const label = isDone ? "Done" : "To do";
  const box = element("span", { class: isDone ? "task-box done" : "task-box", role: "img", "aria-label": label });
  return element("li", { class: "task" }, box, element("div", {}, ...blocks.map(itemNode)));
}

/** Wide formulas scroll. @param {string} text */
function blockFormulaNode(text) {
  const content = text.length <= MAX_FORMULA ? formulaNode(text, true) : text;
  return element("div", { class: "formula", tabindex: 0, role: "group", "aria-label": "Formula" }, content);
}

/** A paragraph of an item has no tags of its own: items stay close together. @param {Block} block */
function itemNode(block) {
  return block.kind === "paragraph" ? element("div", {}, ...inlineNodes(block.text)) : blockNode(block);
}

/** @param {Extract<Block, {kind: "table"}>} block */
function tableNode({ head, align, rows }) {
  const alignment = (/** @type {number} */ index) => ({ class: align[index] ? `align-${align[index]}` : null });
  const headCells = head.map((text, index) => element("th", { scope: "col", ...alignment(index) }, ...inlineNodes(text)));
  const bodyRows = rows.map((row) =>
    element("tr", {}, ...row.map((text, index) => element("td", alignment(index), ...inlineNodes(text)))),
  );
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...headCells)), element("tbody", {}, ...bodyRows));
  return element("div", { class: "table", tabindex: 0, role: "group", "aria-label": "Table" }, table);
}
