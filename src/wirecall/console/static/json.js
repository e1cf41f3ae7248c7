/**
 * JSON without loss: a tree of places in the text. Numbers stay as they were written, members keep
 * their order, and a change replaces the text of one value.
 */

/** @typedef {{type: string, start: number, end: number, text: string, members?: Map<string, Node>, items?: Node[]}} Node */

const DEEPEST = 64;
const LONGEST = 1 << 20;
const TOKEN = /\s*(?:([{}[\],:])|("(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")|(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)|(true|false|null))/y;

/** A text that is not JSON; `place` is the index of its first wrong character. */
export class JsonError extends Error {
  /**
   * @param {number} place
   * @param {string} message
   */
  constructor(place, message) {
    super(message);
    this.place = place;
  }
}

/**
 * @param {string} text
 * @returns {Node}
 */
export function parse(text) {
  if (text.length > LONGEST) throw new JsonError(LONGEST, "Expected at most 1 MB of JSON.");
  let place = 0;
  function next() {
    TOKEN.lastIndex = place;
    const found = TOKEN.exec(text);
    if (!found) {
      const at = place + (/^\s*/.exec(text.slice(place))?.[0].length ?? 0);
      throw new JsonError(at, at >= text.length ? "The JSON ends too early." : `Unexpected ${text[at]}.`);
    }
    const start = place + found[0].length - found[0].trimStart().length;
    place += found[0].length;
    return { sign: found[1], string: found[2], number: found[3], word: found[4], start, end: place };
  }
  /**
   * @param {number} depth
   * @param {ReturnType<typeof next>} token
   * @returns {Node}
   */
  function value(depth, token) {
    if (depth > DEEPEST) throw new JsonError(token.start, `Deeper than ${DEEPEST} levels.`);
    if (token.sign === "{") return object(depth, token.start);
    if (token.sign === "[") return array(depth, token.start);
    if (token.sign) throw new JsonError(token.start, `Unexpected ${token.sign}.`);
    const type = token.string ? "string" : token.number ? "number" : token.word === "null" ? "null" : "boolean";
    return { type, start: token.start, end: token.end, text: text.slice(token.start, token.end) };
  }
  /**
   * @param {number} depth
   * @param {number} start
   */
  function object(depth, start) {
    /** @type {Map<string, Node>} */
    const members = new Map();
    let token = next();
    while (token.sign !== "}") {
      if (!token.string) throw new JsonError(token.start, "Expected the name of a member.");
      const name = JSON.parse(token.string);
      const colon = next();
      if (colon.sign !== ":") throw new JsonError(colon.start, "Expected a colon.");
      members.set(name, value(depth + 1, next()));
      token = next();
      if (token.sign === ",") {
        token = next();
        if (token.sign === "}") throw new JsonError(token.start, "Expected a member after the comma.");
      } else if (token.sign !== "}") throw new JsonError(token.start, "Expected a comma or }.");
    }
    return { type: "object", start, end: token.end, text: text.slice(start, token.end), members };
  }
  /**
   * @param {number} depth
   * @param {number} start
   */
  function array(depth, start) {
    /** @type {Node[]} */
    const items = [];
    let token = next();
    while (token.sign !== "]") {
      items.push(value(depth + 1, token));
      token = next();
      if (token.sign === ",") {
        token = next();
        if (token.sign === "]") throw new JsonError(token.start, "Expected a value after the comma.");
      } else if (token.sign !== "]") throw new JsonError(token.start, "Expected a comma or ].");
    }
    return { type: "array", start, end: token.end, text: text.slice(start, token.end), items };
  }
  const root = value(0, next());
  if (text.slice(place).trim()) throw new JsonError(place, "Unexpected text after the value.");
  return root;
}

/**
 * @param {Node} node
 * @param {(string | number)[]} path
 * @returns {Node | undefined}
 */
export function at(node, path) {
  /** @type {Node | undefined} */
  let found = node;
  for (const step of path) {
    found = typeof step === "number" ? found?.items?.[step] : found?.members?.get(step);
  }
  return found;
}

/**
 * The text with another value at a path; `undefined` removes the member or the item.
 * @param {string} text
 * @param {(string | number)[]} path
 * @param {string | undefined} value
 * @returns {string}
 */
export function put(text, path, value) {
  const root = parse(text);
  const found = at(root, path);
  if (found) {
    if (value !== undefined) return text.slice(0, found.start) + value + text.slice(found.end);
    return without(text, root, path);
  }
  if (value === undefined) return text;
  const name = path[path.length - 1];
  const parent = at(root, path.slice(0, -1));
  if (!parent) return put(text, path.slice(0, -1), typeof name === "number" ? `[${value}]` : `{${JSON.stringify(name)}: ${value}}`);
  const isEmpty = parent.type === "array" ? !parent.items?.length : !parent.members?.size;
  const added = typeof name === "number" ? value : `${JSON.stringify(name)}: ${value}`;
  const close = parent.end - 1;
  const before = text.slice(0, close).trimEnd();
  const space = text.slice(before.length, close);
  if (isEmpty) return `${text.slice(0, parent.start + 1)}${added}${text.slice(close)}`;
  const gap = space.includes("\n") ? `,${space}  ` : ", ";
  return `${before}${gap}${added}${space}${text.slice(close)}`;
}

/**
 * @param {string} text
 * @param {Node} root
 * @param {(string | number)[]} path
 */
function without(text, root, path) {
  const parent = /** @type {Node} */ (at(root, path.slice(0, -1)));
  const name = path[path.length - 1];
  const parts = parent.type === "array" ? (parent.items ?? []) : [...(parent.members?.values() ?? [])];
  const index = typeof name === "number" ? name : [...(parent.members?.keys() ?? [])].indexOf(name);
  const from = index ? parts[index - 1].end : parent.start + 1;
  if (index) return text.slice(0, from) + text.slice(parts[index].end);
  if (parts.length === 1) return text.slice(0, from) + text.slice(parent.end - 1);
  const comma = text.indexOf(",", parts[0].end);
  return text.slice(0, from) + text.slice(comma + 1).trimStart();
}
