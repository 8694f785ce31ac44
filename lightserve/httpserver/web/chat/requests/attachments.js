// @ts-check
/** Files beside the text of a message: texts, and images for models that see them. */

/**
 * @typedef {object} Attachment
 * @property {"text" | "image"} kind
 * @property {string} name
 * @property {string} data the text, or a data: URL
 */

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const IMAGE_URL = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;
const MAX_TEXT = 300_000; // characters: the storage of a browser has five million
const MAX_SIDE = 1536; // pixels; larger images are made smaller
const MAX_UNCHANGED = 250_000; // bytes; larger files become JPEG

/**
 * Reads a file. Throws an error that names it if it can not be sent.
 *
 * @param {File} file
 * @param {boolean} seesImages whether the model does
 * @returns {Promise<Attachment>}
 */
export async function readAttachment(file, seesImages) {
  const name = file.name || "image";
  if (!file.type.startsWith("image/") || file.type === "image/svg+xml") {
    return { kind: "text", name, data: await readText(file) };
  }
  if (!seesImages) {
    throw new Error(`${name}: this model reads no images.`);
  }
  return { kind: "image", name, data: await readImage(file, name) };
}

/** @param {File} file */
async function readText(file) {
  const bytes = await file.arrayBuffer();
  const text = decode(bytes);
  if (text === null || text.includes("\0")) {
    throw new Error(`${file.name} is not a text in UTF-8.`);
  }
  if (text.length > MAX_TEXT) {
    const limit = MAX_TEXT.toLocaleString("en");
    throw new Error(`${file.name} has ${text.length.toLocaleString("en")} characters; the limit is ${limit}.`);
  }
  return text;
}

/** @param {ArrayBuffer} bytes */
function decode(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return null;
  }
}

/**
 * @param {File} file
 * @param {string} name
 */
async function readImage(file, name) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${name} is not an image that this browser can read.`);
  });
  const scale = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= MAX_UNCHANGED && IMAGE_TYPES.includes(file.type)) {
    return dataUrl(file);
  }
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillStyle = "white"; // where the image is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

/** @param {File} file @returns {Promise<string>} */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Whether it is one of this page, as in an imported file. @param {any} found */
export function isAttachment(found) {
  const isText = found?.kind === "text" && typeof found.data === "string";
  return typeof found?.name === "string" && (isText || (found.kind === "image" && IMAGE_URL.test(found.data)));
}

/**
 * The content of a message in OpenAI's format: a text, or a list of images and a text.
 *
 * @param {{content: string, attachments?: Attachment[]}} message
 */
export function contentOf({ content, attachments = [] }) {
  const files = attachments.filter(({ kind }) => kind === "text").map(fileText);
  const text = [...files, content].filter((one) => one !== "").join("\n\n");
  const images = attachments.filter(({ kind }) => kind === "image");
  if (images.length === 0) {
    return text;
  }
  const parts = images.map(({ data }) => ({ type: "image_url", image_url: { url: data } }));
  return [...parts, ...(text === "" ? [] : [{ type: "text", text }])];
}

/** A file in a fence that its text does not close. @param {Attachment} attachment */
function fileText({ name, data }) {
  const longest = Math.max(2, ...(data.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${data.replace(/\n$/, "")}\n${fence}`;
}

/** The images in the parts of a message in OpenAI's format. @param {any} content @returns {Attachment[]} */
export function imagesOf(content) {
  const urls = Array.isArray(content) ? content.map((part) => part?.image_url?.url ?? part?.image_url) : [];
  const images = urls.map((data, index) => ({ kind: "image", name: `Image ${index + 1}`, data }));
  return /** @type {Attachment[]} */ (images.filter(isAttachment));
}
