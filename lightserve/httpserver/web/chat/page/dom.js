// @ts-check
/** Builds DOM nodes. Text becomes text nodes: nothing on this page turns a string into HTML. */

/**
 * @typedef {string | number | boolean | null | undefined | ((event: Event) => void)} Attribute
 */

/**
 * An element. A function in `attributes` listens to the event of that name; false, null and undefined are left out.
 *
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, Attribute>} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/**
 * An element of MathML, in which formulas are written.
 *
 * @param {string} tag
 * @param {Record<string, Attribute>} [attributes]
 * @param {...(Node | string)} children
 */
export function mathElement(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/1998/Math/MathML", tag), attributes, children);
}

/**
 * @template {Element} T
 * @param {T} node
 * @param {Record<string, Attribute>} attributes
 * @param {(Node | string)[]} children
 */
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      node.addEventListener(name, value);
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children);
  return node;
}

/**
 * The element of index.html with this id.
 *
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 */
export function byId(id, type) {
  const node = document.getElementById(id);
  if (!(node instanceof type)) {
    throw new Error(`index.html has no ${type.name} with the id ${id}`);
  }
  return node;
}

/**
 * @param {string} label
 * @param {() => void} onClick
 * @param {Record<string, Attribute>} [attributes]
 */
export function button(label, onClick, attributes = {}) {
  return element("button", { type: "button", class: "quiet", click: onClick, ...attributes }, label);
}

/** Text for screen readers only, such as that an answer is complete. @param {string} text */
export function announce(text) {
  byId("announcer", HTMLDivElement).textContent = text;
}

/** A button that copies text. @param {() => string} getText */
export function copyButton(getText) {
  const node = button("Copy", async () => {
    node.textContent = (await copy(getText())) ? "Copied" : "Not copied";
    announce(node.textContent);
    setTimeout(() => (node.textContent = "Copy"), 1500);
  });
  return node;
}

/** @param {string} text */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // the clipboard API exists only on https and on localhost
  }
}

/** @param {string} text */
function copyBySelection(text) {
  const field = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  const focused = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (focused instanceof HTMLElement) {
    focused.focus();
  }
  return isCopied;
}
