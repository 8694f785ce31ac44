// @ts-check
/** The tool calls of an answer, with fields for their results: this page runs no tools, the person does. */

import { jsonNode } from "../markdown/code_view.js";
import { button, element } from "../page/dom.js";

/** @typedef {import("../conversations/conversations.js").ToolCall} ToolCall */

export class ToolCallsView {
  /** @param {(results: string[]) => void} sendResults */
  constructor(sendResults) {
    this.node = element("div", { class: "tool-calls", hidden: true });
    this._sendResults = sendResults;
    this._shown = "";
  }

  /**
   * @param {ToolCall[]} calls
   * @param {{needsResults: boolean}} state
   */
  update(calls, { needsResults }) {
    const state = JSON.stringify([calls, needsResults]);
    if (state === this._shown) {
      return; // or a result that is being typed would be lost
    }
    this._shown = state;
    this.node.hidden = calls.length === 0;
    this.node.replaceChildren(...calls.map(callNode));
    if (needsResults && calls.length > 0) {
      this.node.append(...this._resultFields(calls));
    }
  }

  /** @param {ToolCall[]} calls */
  _resultFields(calls) {
    const fields = calls.map(() => element("textarea", { rows: 2 }));
    const labels = calls.map(({ name }, index) => element("label", {}, `Result of ${name}`, fields[index]));
    const send = () => this._sendResults(fields.map((field) => field.value));
    const label = calls.length === 1 ? "Send the result" : "Send the results";
    return [...labels, button(label, send, { class: "primary" })];
  }
}

/** @param {ToolCall} call */
function callNode({ name, arguments: text }) {
  const title = element("h3", {}, "Calls ", element("code", {}, name));
  return element("section", { class: "tool-call" }, title, jsonNode(text));
}
