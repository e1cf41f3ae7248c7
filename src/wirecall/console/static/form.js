/**
 * A form from a JSON Schema. A field edits one member of the text, and nothing else. Schemas that
 * the form does not support get a text field for that member, with the schema beside it.
 */

import { at } from "./json.js";
import { html, nothing } from "./lit-html.js";
import { short, visible } from "./text.js";

/** @typedef {import("./json.js").Node} Node */
/** @typedef {(path: (string | number)[], value: string | undefined) => void} Change */

const DEEPEST = 5;
const FORMATS = /** @type {Record<string, string>} */ ({ date: "date", "date-time": "datetime-local", uri: "url", email: "email" });

/**
 * @param {any} schema
 * @param {Node | null} root
 * @param {Change} change
 */
export function fields(schema, root, change) {
  if (!root) return html`<p class="muted">The text is not JSON. Correct it, and the form comes back.</p>`;
  const found = resolved(schema, schema);
  if (!found?.properties || !Object.keys(found.properties).length) return html`<p class="muted">This method takes no params.</p>`;
  return object(found, [], { root, change, whole: schema });
}

/**
 * Follow `$ref` inside the document; any other is not fetched.
 * @param {any} schema
 * @param {any} whole
 * @param {number} [depth]
 * @returns {any}
 */
function resolved(schema, whole, depth = 0) {
  if (!schema || typeof schema !== "object" || depth > 8) return schema;
  const ref = schema.$ref;
  if (typeof ref !== "string") return schema;
  if (!ref.startsWith("#/")) return null;
  let found = whole;
  for (const step of ref.slice(2).split("/")) found = found?.[step.replaceAll("~1", "/").replaceAll("~0", "~")];
  return resolved(found, whole, depth + 1);
}

/** @typedef {{root: Node, change: Change, whole: any}} World */

/**
 * @param {any} schema
 * @param {(string | number)[]} path
 * @param {World} world
 * @returns {unknown}
 */
function object(schema, path, world) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, each]) =>
    field(name, each, [...path, name], required.has(name), world));
}

/**
 * @param {string} name
 * @param {any} given
 * @param {(string | number)[]} path
 * @param {boolean} isRequired
 * @param {World} world
 * @returns {unknown}
 */
function field(name, given, path, isRequired, world) {
  const [schema, canBeNull] = plain(resolved(given, world.whole), world.whole);
  const node = at(world.root, path);
  const id = `field-${path.join("-")}`;
  const title = html`${visible(name)}${isRequired ? html` <span class="mark warn">required</span>` : nothing}`;
  if (schema?.type === "object" && schema.properties && path.length < DEEPEST) {
    return html`<fieldset><legend>${title}</legend>${note(schema)}${object(schema, path, world)}</fieldset>`;
  }
  if (schema?.type === "array" && path.length < DEEPEST) return list(title, schema, path, world);
  return html`<div class="field"><label for=${id}>${title}</label>
    ${control(schema, id, path, node, world)}
    ${note(schema)}
    ${canBeNull || !isRequired ? html`<p class="actions">
      ${canBeNull ? html`<button type="button" @click=${() => world.change(path, "null")}>null<span class="quiet"> for ${visible(name)}</span></button>` : nothing}
      ${!isRequired && node ? html`<button type="button" @click=${() => world.change(path, undefined)}>Leave out<span class="quiet"> ${visible(name)}</span></button>` : nothing}</p>` : nothing}
  </div>`;
}

/**
 * The schema without null, and whether null is allowed; null if the form does not support it.
 * @param {any} schema
 * @param {any} whole
 * @returns {[any, boolean]}
 */
function plain(schema, whole) {
  if (!schema || typeof schema !== "object") return [null, false];
  if (Array.isArray(schema.type)) {
    const others = schema.type.filter((/** @type {string} */ each) => each !== "null");
    return [others.length === 1 ? { ...schema, type: others[0] } : null, schema.type.includes("null")];
  }
  const parts = schema.anyOf;
  if (Array.isArray(parts)) {
    const others = parts.filter((each) => each.type !== "null");
    const { anyOf: _, ...rest } = schema;
    return [others.length === 1 ? { ...rest, ...resolved(others[0], whole) } : null, others.length < parts.length];
  }
  const isOther = ["oneOf", "allOf", "patternProperties", "if", "not"].some((word) => word in schema);
  return [isOther ? null : schema, false];
}

/** @param {any} schema */
function note(schema) {
  if (!schema) return nothing;
  const words = [];
  if (schema.description) words.push(visible(schema.description).slice(0, 300));
  if ("default" in schema) words.push(`default ${short(JSON.stringify(schema.default), 60)}`);
  if (schema.examples?.length) words.push(`for example ${short(JSON.stringify(schema.examples[0]), 60)}`);
  return words.length ? html`<small>${words.join(" · ")}</small>` : nothing;
}

/** A string without its quotes, other JSON as it is. @param {string} text */
function word(text) {
  return text.startsWith('"') ? JSON.parse(text) : text;
}

/**
 * @param {any} schema
 * @param {string} id
 * @param {(string | number)[]} path
 * @param {Node | undefined} node
 * @param {World} world
 */
function control(schema, id, path, node, world) {
  /** @param {string | undefined} value */
  const put = (value) => world.change(path, value);
  if (schema?.enum || (schema && "const" in schema)) {
    const values = (schema.enum ?? [schema.const]).map((/** @type {unknown} */ each) => JSON.stringify(each));
    return html`<select id=${id} @change=${(/** @type {any} */ event) => put(event.target.value || undefined)}>
      <option value="" ?selected=${!node}></option>
      ${values.map((/** @type {string} */ each) => html`<option value=${each} ?selected=${node?.text === each}>${visible(word(each))}</option>`)}</select>`;
  }
  if (schema?.type === "boolean") {
    return html`<input id=${id} type="checkbox" .checked=${node?.text === "true"}
      @change=${(/** @type {any} */ event) => put(String(event.target.checked))}>`;
  }
  if (schema?.type === "string") {
    const value = node?.type === "string" ? JSON.parse(node.text) : "";
    return html`<input id=${id} type=${FORMATS[schema.format] === "url" || FORMATS[schema.format] === "email" ? FORMATS[schema.format] : "text"} spellcheck="false" .value=${value}
      placeholder=${schema.format ?? ""} @input=${(/** @type {any} */ event) => put(JSON.stringify(event.target.value))}>`;
  }
  if (schema?.type === "integer" || schema?.type === "number") {
    // As text: a number of the browser would lose digits.
    const pattern = schema.type === "integer" ? /^-?(?:0|[1-9][0-9]*)$/ : /^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$/;
    return html`<input id=${id} type="text" inputmode="decimal" .value=${node && node.type === "number" ? node.text : ""}
      @input=${(/** @type {any} */ event) => {
        const text = event.target.value.trim();
        const isGood = pattern.test(text);
        event.target.setAttribute("aria-invalid", String(!isGood && text !== ""));
        if (isGood) put(text);
        else if (!text) put(undefined);
      }}>`;
  }
  return html`<textarea id=${id} spellcheck="false" placeholder="JSON" .value=${node?.text ?? ""}
      @change=${(/** @type {any} */ event) => put(event.target.value.trim() || undefined)}></textarea>
    ${schema === undefined ? nothing : html`<small>Any JSON${schema ? html`: <code>${short(JSON.stringify(schema), 200)}</code>` : nothing}</small>`}`;
}

/**
 * @param {unknown} title
 * @param {any} schema
 * @param {(string | number)[]} path
 * @param {World} world
 */
function list(title, schema, path, world) {
  const node = at(world.root, path);
  const count = node?.items?.length ?? 0;
  const item = schema.items ?? {};
  const first = /** @type {Record<string, string>} */ ({ string: '""', integer: "0", number: "0", boolean: "false", object: "{}", array: "[]" });
  const kind = plain(resolved(item, world.whole), world.whole)[0]?.type;
  return html`<fieldset><legend>${title}</legend>${note(schema)}
    ${Array.from({ length: Math.min(count, 50) }, (_, index) => html`
      ${field(String(index + 1), item, [...path, index], true, world)}
      <p class="actions"><button type="button" @click=${() => world.change([...path, index], undefined)}>Remove item ${index + 1}</button></p>`)}
    ${count > 50 ? html`<p class="muted">${count - 50} more items are in the text.</p>` : nothing}
    <p class="actions"><button type="button" @click=${() => (node ? world.change([...path, count], first[kind] ?? "null") : world.change(path, `[${first[kind] ?? "null"}]`))}>Add an item</button></p>
  </fieldset>`;
}
