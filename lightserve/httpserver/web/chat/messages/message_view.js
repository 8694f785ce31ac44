// @ts-check
/** One message on the page: text, thinking, tool calls, error, counts and buttons. */

import { attachmentsNode } from "./attachments_view.js";
import { branchCount } from "../conversations/branches.js";
import { jsonNode } from "../markdown/code_view.js";
import { button, copyButton, element } from "../page/dom.js";
import { statsText } from "../requests/generation.js";
import { MarkdownView } from "../markdown/markdown.js";
import { TokenView } from "./token_view.js";
import { ToolCallsView } from "./tool_calls_view.js";

/**
 * @typedef {import("../conversations/conversations.js").Message} Message
 *
 * What the buttons of a message do.
 * @typedef {object} MessageActions
 * @property {() => void} regenerate
 * @property {() => void} continueAnswer
 * @property {(text: string) => void} edit
 * @property {(to: number) => void} switchBranch
 * @property {() => void} choose this one of two answers that are compared
 * @property {(results: string[]) => void} sendResults of the tool calls, in their order
 */

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };
const FINISH_TEXTS = new Map([
  ["length", "The answer reached the token limit."],
  ["stopped", "Stopped."],
  ["lost", "The rest is lost: the page was away for too long."],
]);
const UNFINISHED = ["length", "stopped", "lost"];

export class MessageView {
  /**
   * @param {Message} message
   * @param {MessageActions} actions
   */
  constructor(message, actions) {
    this.message = message;
    this.isSettled = false; // shown, not the last message, and complete
    this._actions = actions;
    this._showsTokens = false;
    this._thinking = new ThinkingView();
    this._content = element("div", { class: "content" });
    this._markdown = new MarkdownView(this._content);
    this._toolCalls = new ToolCallsView(actions.sendResults);
    this._error = element("p", { class: "error", role: "alert", hidden: true });
    this._branches = branchesNode(message, actions.switchBranch); // made once: an answer grows between two clicks
    this._stats = element("span", { class: "stats" });
    this._buttons = element("span", { class: "message-buttons" });
    const name = NAMES[message.role];
    const { attachments = [], label } = message;
    this.node = element(
      "article",
      { class: `message ${message.role}`, "aria-label": name },
      element("h2", { class: "author" }, label ? `${name} · ${label}` : name),
      ...(attachments.length > 0 ? [attachmentsNode(attachments)] : []),
      this._thinking.node,
      this._content,
      this._toolCalls.node,
      this._error,
      element("footer", {}, this._branches, this._stats, this._buttons),
    );
  }

  /**
   * Shows the message as it is now.
   *
   * @param {{isWriting: boolean, isLast: boolean}} state
   */
  update({ isWriting, isLast }) {
    const { message } = this;
    this.isSettled = !isLast && !isWriting;
    this.node.classList.toggle("writing", isWriting);
    this.node.setAttribute("aria-busy", String(isWriting));
    this._thinking.update(message, isWriting);
    this._showContent();
    this._toolCalls.update(message.toolCalls ?? [], { needsResults: isLast && !isWriting });
    this._error.hidden = message.error === undefined;
    this._error.textContent = message.error ?? "";
    this._stats.textContent = this._statsText();
    this._buttons.replaceChildren(...(isWriting ? [] : this._makeButtons(isLast)));
  }

  _showContent() {
    const { role, content, isJson, tokens } = this.message;
    if (this._showsTokens && tokens !== undefined) {
      this._content.replaceChildren(new TokenView(tokens).node);
    } else if (isJson && content !== "") {
      this._content.replaceChildren(jsonNode(content));
    } else if (role === "assistant") {
      this._markdown.show(content);
    } else {
      this._content.textContent = content;
    }
  }

  _statsText() {
    const { stats, finishReason } = this.message;
    const finish = FINISH_TEXTS.get(finishReason ?? "");
    return [finish, stats && statsText(stats)].filter(Boolean).join(" ");
  }

  /** @param {string} label of the button that had the focus, or of the other one if that has no effect here */
  focusBranchButton(label) {
    const enabled = [...this._branches.querySelectorAll("button")].filter((one) => !one.disabled);
    (enabled.find((one) => one.getAttribute("aria-label") === label) ?? enabled[0])?.focus();
  }

  /** @param {boolean} isLast */
  _makeButtons(isLast) {
    const { role, content, comparison, tokens } = this.message;
    const buttons = content === "" ? [] : [copyButton(() => this.message.content)];
    if (role === "user") {
      buttons.push(button("Edit", () => this._edit()));
    }
    if (role === "assistant" && tokens !== undefined) {
      const attributes = { "aria-pressed": String(this._showsTokens) };
      buttons.push(button("Probabilities", () => this._toggleTokens(isLast), attributes));
    }
    if (role === "assistant" && comparison !== undefined && (isLast || this.message.branch === undefined)) {
      return [...buttons, button("Go on with this one", this._actions.choose)];
    }
    if (role === "assistant") {
      buttons.push(...(isLast && this._canContinue ? [button("Continue", this._actions.continueAnswer)] : []));
      buttons.push(button("Regenerate", this._actions.regenerate));
    }
    return buttons;
  }

  /** Whether the model can go on with this text: JSON that follows a schema would begin again. */
  get _canContinue() {
    const { content, finishReason, error, isJson, toolCalls = [] } = this.message;
    const isUnfinished = UNFINISHED.includes(finishReason ?? "") || error !== undefined;
    return isUnfinished && content !== "" && !isJson && toolCalls.length === 0;
  }

  /** @param {boolean} isLast */
  _toggleTokens(isLast) {
    this._showsTokens = !this._showsTokens;
    this._content.replaceChildren();
    this._markdown = new MarkdownView(this._content);
    this.update({ isWriting: false, isLast });
    [...this._buttons.querySelectorAll("button")].find((one) => one.textContent === "Probabilities")?.focus();
  }

  /** Replaces the text by a field. Saving it asks again from here. */
  _edit() {
    const field = element("textarea", { "aria-label": "Edit the message", rows: 4 });
    field.value = this.message.content;
    const close = () => {
      this.update({ isWriting: false, isLast: false });
      this._buttons.querySelectorAll("button")[1]?.focus();
    };
    const save = () => this._actions.edit(field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    this._content.replaceChildren(field);
    this._buttons.replaceChildren(button("Send again", save, { class: "primary" }), button("Cancel", close));
    field.focus();
  }
}

/**
 * Two buttons around "2 / 3"; hidden if the message has no other version.
 *
 * @param {Message} message
 * @param {(to: number) => void} switchBranch
 */
function branchesNode(message, switchBranch) {
  const count = branchCount(message);
  const shown = message.branch?.index ?? 0;
  const previous = branchButton("←", "Previous version", shown > 0, () => switchBranch(shown - 1));
  const next = branchButton("→", "Next version", shown < count - 1, () => switchBranch(shown + 1));
  const attributes = { class: "branches", role: "group", "aria-label": "Versions", hidden: count === 1 };
  return element("span", attributes, previous, `${shown + 1} / ${count}`, next);
}

/**
 * @param {string} text
 * @param {string} label
 * @param {boolean} isEnabled
 * @param {() => void} onClick
 */
function branchButton(text, label, isEnabled, onClick) {
  return button(text, onClick, { "aria-label": label, title: label, disabled: !isEnabled });
}

/** The reasoning of an answer, folded. */
class ThinkingView {
  constructor() {
    this._summary = element("summary");
    this._text = element("div", { class: "content" });
    this._markdown = new MarkdownView(this._text);
    this.node = element("details", { class: "thinking", hidden: true }, this._summary, this._text);
  }

  /**
   * @param {Message} message
   * @param {boolean} isWriting
   */
  update({ reasoning, reasoningMs, content }, isWriting) {
    this.node.hidden = !reasoning;
    if (!reasoning) {
      return;
    }
    const isThinking = isWriting && content === "";
    const time = reasoningMs === undefined ? "" : ` for ${(reasoningMs / 1000).toFixed(1)} s`;
    this._summary.textContent = isThinking ? "Thinking…" : `Thought${time}`;
    this._markdown.show(reasoning);
  }
}
