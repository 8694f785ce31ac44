// @ts-check
/** How much of the model's context the chat uses. */

import { byId } from "../page/dom.js";

export class ContextMeter {
  constructor() {
    this.limit = 0; // tokens; 0: not known yet
  }

  /** @param {import("../conversations/conversations.js").Message[]} messages */
  show(messages) {
    const stats = messages.findLast((message) => (message.stats?.promptTokens ?? 0) > 0)?.stats;
    const isKnown = stats !== undefined && this.limit > 0;
    byId("context-use", HTMLParagraphElement).hidden = !isKnown;
    if (isKnown) {
      const used = stats.promptTokens + stats.outputTokens - (stats.earlierTokens ?? 0);
      const share = Math.min(used / this.limit, 1);
      byId("context-bar", HTMLProgressElement).value = share;
      const [shown, limit] = [used.toLocaleString("en"), this.limit.toLocaleString("en")];
      byId("context-text", HTMLSpanElement).textContent = `${shown} of ${limit} tokens`;
    }
  }
}
