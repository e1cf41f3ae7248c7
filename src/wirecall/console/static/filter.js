/**
 * The filter language of calls. `wirecall/console/filter.py` is the same in Python, and
 * `tests/console/filters.json` has the cases that both must agree on.
 */

/** @typedef {Record<string, any>} Row */
/** @typedef {(row: Row, now: number) => boolean} Test */

const TERM = /\s*(-?)(?:([A-Za-z_]+):)?((?:"[^"]*"|[^\s"])*)/y;
const NUMBER = /^(>=|<=|>|<|=)?(-?[0-9]+(?:\.[0-9]+)?)(us|ms|s|m)?$/;
const AGE = /^([0-9]+(?:\.[0-9]+)?)(s|m|h|d)$/;
/** @type {Record<string, number>} */
const MS = { us: 0.001, ms: 1, s: 1000, m: 60_000 };
/** @type {Record<string, number>} */
const SECONDS = { s: 1, m: 60, h: 3600, d: 86_400 };
/** @type {Record<string, string>} */
const STATUS = {
  ok: "ok",
  error: "error",
  cancelled: "cancelled",
  input: "input required",
  undelivered: "undelivered",
};
/** @type {Record<string, (one: number, other: number) => boolean>} */
const COMPARED = {
  ">": (one, other) => one > other,
  ">=": (one, other) => one >= other,
  "<": (one, other) => one < other,
  "<=": (one, other) => one <= other,
  "=": (one, other) => one === other,
};
/** @type {Record<string, string>} */
const TEXT = {
  method: "method",
  tool: "tool",
  caller: "caller",
  key: "key",
  batch: "batch",
  worker: "worker",
  id: "rpc_id",
};
/** @type {Record<string, string[]>} */
const WORDS = { kind: ["query", "command"], transport: ["rpc", "mcp"] };
const SEARCHED = ["method", "caller", "key", "call_id", "rpc_id"];
export const NAMES = [
  ...Object.keys(TEXT),
  ...Object.keys(WORDS),
  ...["status", "replayed", "duration", "code", "since"],
];

/** A filter that cannot be read; `place` is the index of its first wrong character. */
export class FilterError extends Error {
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
 * @returns {Test} whether a row fits, at a moment in Unix seconds
 */
export function readFilter(text) {
  /** @type {Test[]} */
  const tests = [];
  const end = text.trimEnd().length;
  let place = 0;
  while (place < end) {
    TERM.lastIndex = place;
    const found = /** @type {RegExpExecArray} */ (TERM.exec(text));
    const start = place + found[0].length - found[0].trimStart().length;
    place += found[0].length;
    if (place < end && text[place] === '"') throw new FilterError(place, "A quote is not closed.");
    tests.push(term(start, found[1] === "-", found[2], found[3] ?? ""));
  }
  return (row, now) => tests.every((test) => test(row, now));
}

/**
 * @param {number} place
 * @param {boolean} negated
 * @param {string | undefined} name
 * @param {string} value
 * @returns {Test}
 */
function term(place, negated, name, value) {
  const test = name === undefined ? contains(place, value) : anyOf(place, name, value);
  return negated ? (row, now) => !test(row, now) : test;
}

/**
 * @param {number} place
 * @param {string} value
 * @returns {Test}
 */
function contains(place, value) {
  const word = value.replaceAll('"', "").toLowerCase();
  if (!word) throw new FilterError(place, "A term is empty.");
  return (row) => SEARCHED.some((name) => text(row[name]).includes(word));
}

/**
 * @param {number} place
 * @param {string} name
 * @param {string} value
 * @returns {Test}
 */
function anyOf(place, name, value) {
  if (!value) throw new FilterError(place, `${name}: has no value.`);
  const parts = value.match(/(?:"[^"]*"|[^,"])+/g) ?? [""];
  const tests = parts.map((part) => named(place, name.toLowerCase(), part.replaceAll('"', "")));
  return (row, now) => tests.some((test) => test(row, now));
}

/**
 * @param {number} place
 * @param {string} name
 * @param {string} value
 * @returns {Test}
 */
function named(place, name, value) {
  if (TEXT[name]) return matches(TEXT[name], value);
  if (WORDS[name]) {
    const word = oneOf(place, name, value, WORDS[name]);
    return (row) => row[name] === word;
  }
  if (name === "status") {
    const word = oneOf(place, name, value, [...Object.keys(STATUS), "replayed"]);
    if (word === "replayed") return (row) => row.replayed === true;
    return (row) => row.outcome === STATUS[word];
  }
  if (name === "replayed") {
    const wanted = oneOf(place, name, value, ["yes", "no"]) === "yes";
    return (row) => row.replayed === wanted;
  }
  if (name === "duration") return compares(place, "ms", value, true);
  if (name === "code") return compares(place, "code", value, false);
  if (name === "since") return since(place, value);
  throw new FilterError(place, `There is no filter ${name}:. Known are ${NAMES.join(", ")}.`);
}

/**
 * @param {number} place
 * @param {string} name
 * @param {string} value
 * @param {string[]} known
 */
function oneOf(place, name, value, known) {
  const word = value.toLowerCase();
  if (known.includes(word)) return word;
  throw new FilterError(place, `${name}: expected one of ${known.join(", ")}, got "${value}".`);
}

/**
 * @param {string} member
 * @param {string} value
 * @returns {Test}
 */
function matches(member, value) {
  const parts = value.toLowerCase().split("*");
  const escaped = parts.map((part) => part.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&"));
  const pattern = new RegExp(`^(?:${escaped.join(".*")})$`, "s");
  return (row) => pattern.test(text(row[member]));
}

/**
 * @param {number} place
 * @param {string} member
 * @param {string} value
 * @param {boolean} hasUnit
 * @returns {Test}
 */
function compares(place, member, value, hasUnit) {
  const found = NUMBER.exec(value);
  if (!found || (found[3] && !hasUnit)) {
    const example = hasUnit ? "duration:>500ms" : "code:>=500";
    throw new FilterError(place, `Expected a number such as ${example}, got "${value}".`);
  }
  const wanted = Number(found[2]) * (hasUnit ? MS[found[3] ?? "ms"] : 1);
  const compare = COMPARED[found[1] ?? "="];
  return (row) => typeof row[member] === "number" && compare(row[member], wanted);
}

/**
 * @param {number} place
 * @param {string} value
 * @returns {Test}
 */
function since(place, value) {
  const found = AGE.exec(value);
  if (!found) throw new FilterError(place, `Expected a time such as since:10m, got "${value}".`);
  const age = Number(found[1]) * SECONDS[found[2]];
  return (row, now) => typeof row.at === "number" && row.at >= now - age;
}

/** @param {unknown} value */
function text(value) {
  return String(value ?? "").toLowerCase();
}
