// @ts-check
/** The attachments of a message, and those of the message that is being written. */

import { codeNode } from "../markdown/code_view.js";
import { button, element } from "../page/dom.js";

/** @typedef {import("../requests/attachments.js").Attachment} Attachment */

/** Images, and texts that are folded. @param {Attachment[]} attachments */
export function attachmentsNode(attachments) {
  return element("div", { class: "attachments" }, ...attachments.map(attachmentNode));
}

/** @param {Attachment} attachment */
function attachmentNode({ kind, name, data }) {
  if (kind === "image") {
    return element("img", { src: data, alt: name, title: name });
  }
  const lines = data.split("\n").length;
  const summary = element("summary", {}, `${name} (${lines.toLocaleString("en")} ${lines === 1 ? "line" : "lines"})`);
  const details = element("details", { class: "attachment" }, summary);
  const showText = () => details.append(codeNode(name.split(".").pop() ?? "", data));
  details.addEventListener("toggle", showText, { once: true });
  return details;
}

/**
 * An attachment that can be removed.
 *
 * @param {Attachment} attachment
 * @param {() => void} remove
 */
export function chipNode({ kind, name, data }, remove) {
  const image = kind === "image" ? [element("img", { src: data, alt: "" })] : [];
  const label = `Remove ${name}`;
  return element("li", {}, ...image, element("span", {}, name), button("✕", remove, { "aria-label": label, title: label }));
}
