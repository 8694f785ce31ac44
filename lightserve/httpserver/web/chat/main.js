// @ts-check
/** The chat page: connects the parts with the elements of index.html. */

import { forgetKey, getJson, hasKey, setKeyDialog } from "./requests/api.js";
import { Chat } from "./requests/chat.js";
import { Comparison } from "./requests/comparison.js";
import { Composer } from "./requests/composer.js";
import { ContextMeter } from "./requests/context_meter.js";
import { ConversationList } from "./conversations/conversation_list.js";
import { ConversationStore, isConversationChange } from "./conversations/conversations.js";
import { ask } from "./page/dialogs.js";
import { announce, byId } from "./page/dom.js";
import { connectDrawers } from "./page/drawers.js";
import { readConversation } from "./conversations/import.js";
import { MessageList } from "./messages/message_list.js";
import { ModelCard } from "./model/model_card.js";
import { PromptLibrary } from "./model/prompt_library.js";
import { DEFAULT_SETTINGS, SettingsError, SettingsForm } from "./model/settings.js";
import { connectThemeSelect } from "./page/theme.js";

const sendButton = byId("send", HTMLButtonElement);
const forgetKeyButton = byId("forget-key", HTMLButtonElement);
const closeDrawers = connectDrawers();
const contextMeter = new ContextMeter();
let servedModel = "";

const store = new ConversationStore();
const messageList = new MessageList(byId("log", HTMLDivElement), {
  regenerate: (message) => run(() => chat.regenerate(message)),
  continueAnswer: () => run(() => chat.continueAnswer()),
  edit: (message, text) => run(() => chat.edit(message, text)),
  switchBranch: (message, to) => chat.switchBranch(message, to),
  choose: (message, to) => chat.choose(message, to),
  sendResults: (message, results) => run(() => chat.sendResults(message, results)),
  suggest: (text) => composer.suggest(text),
});
const conversationList = new ConversationList(byId("conversation-list", HTMLUListElement), {
  open: (conversation) => openConversation(conversation),
  rename: renameConversation,
  remove: removeConversation,
});
const chat = new Chat(store, messageList, {
  changed: () => {
    conversationList.show(store.list(), chat.conversation.id);
    contextMeter.show(chat.conversation.messages);
  },
  generating: showGenerating,
  failed: showFailure,
});
const composer = new Composer({
  isGenerating: () => chat.isGenerating,
  stop: () => chat.stop(),
  send: (text, attachments) => {
    const { messages } = chat.conversation;
    run(() => chat.send(text, attachments));
    return chat.conversation.messages !== messages;
  },
  failed: showFailure,
});
const settingsForm = new SettingsForm(byId("settings", HTMLFormElement), (settings) => {
  comparison.settings = settings;
  promptLibrary.show();
  showServedModel();
  saveSettings();
});
const promptLibrary = new PromptLibrary(settingsForm.systemPrompt);
const comparison = new Comparison(
  () => chat.conversation,
  () => {
    settingsForm.show(comparison.settings);
    promptLibrary.show();
    showServedModel();
    saveSettings();
  },
);
const modelCard = new ModelCard(async ({ model, sampling, limits }) => {
  forgetKeyButton.hidden = !hasKey();
  settingsForm.showDefaults({ ...sampling, max_tokens: limits.max_req_total_len, seed: "random" });
  composer.seesImages = model.input_modalities.includes("image");
  contextMeter.limit = limits.max_req_total_len;
  contextMeter.show(chat.conversation.messages);
  servedModel = model.name;
  showServedModel();
  settingsForm.showModels((await getJson("v1/models")).data);
});

function showServedModel() {
  byId("served-model", HTMLSpanElement).textContent = chat.conversation.settings.model || servedModel;
}

/** An empty chat is not kept. */
function saveSettings() {
  if (chat.conversation.messages.length > 0) {
    chat.save();
  }
}

/** Lets an answer be written, with the focus on the message field. @param {() => Promise<void>} start */
function run(start) {
  composer.focus(); // before a refused setting takes the focus
  start().catch(showFailure);
}

/** @param {import("./conversations/conversations.js").Conversation} conversation */
function openConversation(conversation) {
  chat.open(conversation);
  comparison.reset();
  closeDrawers();
  if (!matchMedia("(pointer: coarse)").matches) {
    composer.focus(); // on a phone it would open the keyboard
  }
}

/** @param {import("./conversations/conversations.js").Conversation} conversation */
async function renameConversation(conversation) {
  const title = await ask({
    title: "Rename the chat",
    confirm: "Rename",
    input: { label: "Title", value: conversation.title },
  });
  if (title) {
    conversation.title = title;
    conversation.isRenamed = true;
    chat.save();
    conversationList.show(store.list(), chat.conversation.id);
  }
}

/** @param {import("./conversations/conversations.js").Conversation} conversation */
async function removeConversation(conversation) {
  const message = `"${conversation.title}" is kept only in this browser.`;
  if ((await ask({ title: "Delete the chat?", message, confirm: "Delete" })) !== null) {
    store.delete(conversation.id);
    openConversation(store.list()[0] ?? store.create());
  }
}

/** Opens the last of the chats in these files. @param {File[]} files */
async function importConversations(files) {
  for (const file of files) {
    const found = readConversation(file.name, await file.text());
    const conversation = Object.assign(store.create({ ...DEFAULT_SETTINGS, ...found.settings }), found.parts);
    store.save(conversation);
    openConversation(conversation);
  }
  announce(`${files.length} imported`);
}

/** @param {boolean} isGenerating */
function showGenerating(isGenerating) {
  sendButton.textContent = isGenerating ? "Stop" : "Send";
  sendButton.classList.toggle("stop", isGenerating);
}

/** @param {Error} error */
function showFailure(error) {
  if (error instanceof SettingsError) {
    settingsForm.showError(error);
  } else {
    ask({ title: "This did not work", message: error.message, confirm: "Close" });
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.isGenerating && !byId("text-dialog", HTMLDialogElement).open) {
    chat.stop();
  }
});
byId("new-conversation", HTMLButtonElement).addEventListener("click", () => {
  openConversation(store.create(chat.conversation.settings));
});
const importFile = byId("import-file", HTMLInputElement);
byId("import", HTMLButtonElement).addEventListener("click", () => importFile.click());
importFile.addEventListener("change", () => {
  importConversations([...(importFile.files ?? [])]).catch(showFailure);
  importFile.value = ""; // the same file may be chosen again
});
forgetKeyButton.addEventListener("click", () => {
  forgetKey();
  forgetKeyButton.hidden = true;
});
window.addEventListener("storage", (event) => {
  if (isConversationChange(event) && !chat.isGenerating) {
    store.reload();
    openConversation(store.get(chat.conversation.id) ?? chat.conversation);
  }
});
window.addEventListener("pagehide", () => chat.leave());
window.addEventListener("pageshow", (event) => {
  if (event.persisted) {
    location.reload(); // the browser kept the page, but not its connections
  }
});

setKeyDialog(async (isWrong) => {
  const key = await ask({
    title: "API key",
    message: isWrong ? "The server refused this key." : "This server needs an API key. The browser keeps it.",
    confirm: "Save",
    input: { label: "Key", value: "", isSecret: true },
  });
  forgetKeyButton.hidden = key === null;
  return key;
});
connectThemeSelect(byId("theme", HTMLSelectElement));
openConversation(chat.conversation);
modelCard.start();
run(() => chat.resume());
