// @ts-check
/** The open conversation: sends messages, writes answers into it, and keeps storage and page up to date. */

import { addBranch, switchBranch } from "./branches.js";
import { announce } from "./dom.js";
import { emptyAnswer, generate, requestBody } from "./generation.js";

/**
 * @typedef {import("./conversations.js").Conversation} Conversation
 * @typedef {import("./conversations.js").Message} Message
 *
 * @typedef {object} ChatEvents
 * @property {() => void} changed the list of conversations, or which one is open
 * @property {(isGenerating: boolean) => void} generating
 * @property {(error: Error) => void} failed a request could not be made, or a conversation not be saved
 */

const SAVE_EVERY_MS = 1000; // while an answer grows

export class Chat {
  /**
   * @param {import("./conversations.js").ConversationStore} store
   * @param {import("./message_list.js").MessageList} list
   * @param {ChatEvents} events
   */
  constructor(store, list, events) {
    this._store = store;
    this._list = list;
    this._events = events;
    /** @type {Conversation} */
    this.conversation = store.list()[0] ?? store.create();
    /** @type {AbortController | null} */
    this._running = null;
    this._savedMs = 0;
  }

  get isGenerating() {
    return this._running !== null;
  }

  /** @param {Conversation} conversation */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this._list.show(conversation, null);
    this._events.changed();
  }

  /** Aborts the answer that is being written; what has arrived stays. */
  stop() {
    const answer = this.conversation.messages[this.conversation.messages.length - 1];
    if (this._running !== null) {
      answer.finishReason = "stopped"; // before a branch is made of it
      this._running.abort();
    }
    this._running = null;
    this._events.generating(false);
  }

  /** @param {string} text */
  async send(text) {
    await this._continue([...this.conversation.messages, { role: "user", content: text }]);
  }

  /** Writes another answer beside this one. @param {Message} message */
  async regenerate(message) {
    const { messages } = this.conversation;
    const index = messages.indexOf(message);
    await this._continue(messages.slice(0, index), (answer) => addBranch(messages, index, answer));
  }

  /**
   * Asks again with another text, beside this message of the person and what followed it.
   *
   * @param {Message} message
   * @param {string} text
   */
  async edit(message, text) {
    const { messages } = this.conversation;
    await this._continue(addBranch(messages, messages.indexOf(message), { role: "user", content: text }));
  }

  /**
   * Shows another branch from this message on, and ends an answer that is being written.
   *
   * @param {Message} message
   * @param {number} to
   */
  switchBranch(message, to) {
    const { conversation } = this;
    this.stop();
    conversation.messages = switchBranch(conversation.messages, conversation.messages.indexOf(message), to);
    this.save();
    this._list.show(conversation, null);
  }

  /**
   * @param {Message} message with tool calls
   * @param {string[]} results
   */
  async sendResults(message, results) {
    /** @type {Message[]} */
    const messages = (message.toolCalls ?? []).map(({ id }, index) => ({
      role: "tool",
      content: results[index],
      toolCallId: id,
    }));
    await this._continue([...this.conversation.messages, ...messages]);
  }

  save() {
    this._savedMs = performance.now();
    try {
      this._store.save(this.conversation);
    } catch (error) {
      this._events.failed(/** @type {Error} */ (error));
    }
  }

  /**
   * Lets the model answer these messages.
   *
   * @param {Message[]} messages
   * @param {(answer: Message) => Message[]} withAnswer the conversation with the answer
   */
  async _continue(messages, withAnswer = (answer) => [...messages, answer]) {
    const { conversation } = this;
    const body = this._requestBody({ ...conversation, messages });
    if (body === null || this.isGenerating) {
      return;
    }
    const running = new AbortController();
    conversation.messages = withAnswer(emptyAnswer());
    const answer = conversation.messages[conversation.messages.length - 1];
    this._running = running;
    this.save();
    this._list.show(conversation, answer);
    this._events.changed();
    this._events.generating(true);
    announce("The answer is being written.");
    await generate(body, answer, () => this._onChunk(running, answer), running.signal);
    this._finish(running, conversation, answer);
  }

  /** @param {Conversation} conversation */
  _requestBody(conversation) {
    try {
      return requestBody(conversation);
    } catch (error) {
      this._events.failed(/** @type {Error} */ (error));
      return null;
    }
  }

  /**
   * @param {AbortController} running
   * @param {Message} answer
   */
  _onChunk(running, answer) {
    if (this._running !== running) {
      return; // stopped, and perhaps another conversation is open
    }
    this._list.updateLast(answer);
    if (performance.now() - this._savedMs > SAVE_EVERY_MS) {
      this.save();
    }
  }

  /**
   * @param {AbortController} running
   * @param {Conversation} conversation
   * @param {Message} answer
   */
  _finish(running, conversation, answer) {
    if (this._running === running) {
      this._running = null;
      this._events.generating(false);
    }
    if (this.conversation === conversation) {
      this.save();
      this._list.updateLast(null);
      this._events.changed();
      announce(answer.error ? `Error: ${answer.error}` : `The answer is complete. ${answer.content}`);
    } else if (this._store.get(conversation.id) !== undefined) {
      this._store.save(conversation); // another one is open now; a deleted one stays deleted
    }
  }
}
