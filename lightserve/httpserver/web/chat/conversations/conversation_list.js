// @ts-check
/** The list of conversations, with buttons to rename, export and delete the one that is open. */

import { hasText, openaiMessages } from "./conversations.js";
import { byId, button, element } from "../page/dom.js";

/**
 * @typedef {import("./conversations.js").Conversation} Conversation
 *
 * @typedef {object} ConversationActions
 * @property {(conversation: Conversation) => void} open
 * @property {(conversation: Conversation) => void} rename
 * @property {(conversation: Conversation) => void} remove
 */

export class ConversationList {
  /**
   * @param {HTMLElement} list
   * @param {ConversationActions} actions
   */
  constructor(list, actions) {
    this._list = list;
    this._actions = actions;
    /** @type {Conversation[]} */
    this._conversations = [];
    this._openId = "";
    this._search = byId("conversation-search", HTMLInputElement);
    this._search.addEventListener("input", () => this._showFound());
  }

  /**
   * @param {Conversation[]} conversations
   * @param {string} openId
   */
  show(conversations, openId) {
    this._conversations = conversations;
    this._openId = openId;
    this._showFound();
  }

  /** Shows the conversations with every word of the search. */
  _showFound() {
    const words = this._search.value.toLowerCase().split(/\s+/).filter((word) => word !== "");
    const found = this._conversations.filter((one) => words.every((word) => hasText(one, word)));
    this._list.replaceChildren(...found.map((one) => this._item(one, one.id === this._openId)));
    byId("conversation-none", HTMLParagraphElement).hidden = words.length === 0 || found.length > 0;
  }

  /**
   * @param {Conversation} conversation
   * @param {boolean} isOpen
   */
  _item(conversation, isOpen) {
    const { title } = conversation;
    const open = button(title, () => this._actions.open(conversation), {
      class: "conversation",
      title,
      "aria-current": isOpen ? "true" : null,
    });
    const item = element("li", {}, open);
    if (isOpen) {
      const actions = [
        button("Rename", () => this._actions.rename(conversation)),
        button("Export", () => exportConversation(conversation)),
        button("Delete", () => this._actions.remove(conversation)),
      ];
      item.append(element("div", { class: "conversation-actions" }, ...actions));
    }
    return item;
  }
}

/**
 * Downloads the conversation as JSON: the messages in OpenAI's format, and as "history" with all branches and counts.
 *
 * @param {Conversation} conversation
 */
function exportConversation(conversation) {
  const { title, settings, messages: history } = conversation;
  const text = JSON.stringify({ title, settings, messages: openaiMessages(conversation), history }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat";
  element("a", { href: url, download: `${name}.json` }).click();
  URL.revokeObjectURL(url);
}
