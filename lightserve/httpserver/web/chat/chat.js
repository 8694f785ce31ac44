// @ts-check
/** The open conversation: sends messages, writes answers into it, and keeps storage and page up to date. */

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
    this._running?.abort();
    this._running = null;
    this._events.generating(false);
  }

  /** @param {string} text */
  async send(text) {
    await this._continue([...this.conversation.messages, { role: "user", content: text }]);
  }

  /** Replaces the last answer. */
  async regenerate() {
    await this._continue(this.conversation.messages.slice(0, -1));
  }

  /**
   * Replaces a message of the person, and drops what followed it.
   *
   * @param {Message} message
   * @param {string} text
   */
  async edit(message, text) {
    const index = this.conversation.messages.indexOf(message);
    await this._continue([...this.conversation.messages.slice(0, index), { role: "user", content: text }]);
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

  /** Lets the model answer these messages. @param {Message[]} messages */
  async _continue(messages) {
    const { conversation } = this;
    const body = this._requestBody({ ...conversation, messages });
    if (body === null || this.isGenerating) {
      return;
    }
    const answer = emptyAnswer();
    const running = new AbortController();
    conversation.messages = [...messages, answer];
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
