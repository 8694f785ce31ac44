// @ts-check
/** The messages of the conversation that is shown. */

import { branchCount } from "./branches.js";
import { announce, button, element } from "./dom.js";
import { MessageView } from "./message_view.js";

/**
 * @typedef {import("./conversations.js").Conversation} Conversation
 * @typedef {import("./conversations.js").Message} Message
 *
 * @typedef {object} ListActions
 * @property {(message: Message) => void} regenerate
 * @property {(message: Message, text: string) => void} edit
 * @property {(message: Message, to: number) => void} switchBranch
 * @property {(message: Message, results: string[]) => void} sendResults
 * @property {(text: string) => void} suggest
 */

const SUGGESTIONS = [
  "Explain how a hash table works",
  "Write a Python function that checks for palindromes",
  "Compare tea and coffee in a table",
];
const AT_END_PX = 40; // closer to the end than this, the list follows a growing answer

export class MessageList {
  /**
   * @param {HTMLElement} container
   * @param {ListActions} actions
   */
  constructor(container, actions) {
    this._container = container;
    this._actions = actions;
    /** @type {MessageView[]} */
    this._views = [];
    this._frame = 0;
  }

  /**
   * Shows a conversation from its first message on.
   *
   * @param {Conversation} conversation
   * @param {Message | null} writing the answer that is being written
   */
  show(conversation, writing) {
    this._views = conversation.messages.map((message) => this._viewOf(message));
    const isEmpty = this._views.length === 0;
    this._container.replaceChildren(...(isEmpty ? [this._emptyNode()] : this._views.map((view) => view.node)));
    this._views.forEach((view, index) => view.update(this._stateOf(index, writing)));
    this._container.scrollTop = this._container.scrollHeight;
  }

  /** Shows what changed in the last message, at most once a frame. @param {Message | null} writing */
  updateLast(writing) {
    cancelAnimationFrame(this._frame);
    const update = () => {
      const { scrollHeight, scrollTop, clientHeight } = this._container;
      const isAtEnd = scrollHeight - scrollTop - clientHeight < AT_END_PX;
      const index = this._views.length - 1;
      this._views[index]?.update(this._stateOf(index, writing));
      if (isAtEnd) {
        this._container.scrollTop = this._container.scrollHeight;
      }
    };
    if (writing === null) {
      update();
    } else {
      this._frame = requestAnimationFrame(update);
    }
  }

  /**
   * @param {number} index
   * @param {Message | null} writing
   */
  _stateOf(index, writing) {
    return { isLast: index === this._views.length - 1, isWriting: this._views[index].message === writing };
  }

  /** @param {Message} message */
  _viewOf(message) {
    return new MessageView(message, {
      regenerate: () => this._actions.regenerate(message),
      edit: (text) => this._actions.edit(message, text),
      switchBranch: (to) => this._switchBranch(message, to),
      sendResults: (results) => this._actions.sendResults(message, results),
    });
  }

  /**
   * Shows another branch. The place and the focus stay, so that one can go through all of them.
   *
   * @param {Message} message
   * @param {number} to
   */
  _switchBranch(message, to) {
    const index = this._views.findIndex((view) => view.message === message);
    const label = document.activeElement?.getAttribute("aria-label") ?? "";
    const { scrollTop } = this._container;
    this._actions.switchBranch(message, to);
    this._container.scrollTop = scrollTop;
    this._views[index].focusBranchButton(label);
    const { branch } = this._views[index].message;
    announce(`Version ${(branch?.index ?? 0) + 1} of ${branchCount(this._views[index].message)}`);
  }

  _emptyNode() {
    const buttons = SUGGESTIONS.map((text) => button(text, () => this._actions.suggest(text), { class: "suggestion" }));
    return element("div", { class: "empty" }, element("h2", {}, "What can I do for you?"), ...buttons);
  }
}
