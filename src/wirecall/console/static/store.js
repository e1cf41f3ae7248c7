/**
 * Values that a page depends on. An effect runs again, once per frame, when a value that it read
 * has changed.
 */

/** @typedef {{run: () => void, isDue: boolean}} Effect */

/** @type {Effect | null} */
let current = null;
/** @type {Set<Effect>} */
const due = new Set();

/**
 * @template T
 * @param {T} initial
 * @returns {{value: T}}
 */
export function signal(initial) {
  let held = initial;
  /** @type {Set<Effect>} */
  const readers = new Set();
  return {
    get value() {
      if (current) readers.add(current);
      return held;
    },
    set value(next) {
      if (Object.is(held, next)) return;
      held = next;
      for (const effect of readers) schedule(effect);
    },
  };
}

/**
 * Run a function now, and again when a signal that it read has changed.
 * @param {() => void} run
 */
export function effect(run) {
  const made = { run, isDue: false };
  execute(made);
}

/** @param {Effect} effect */
function execute(effect) {
  const before = current;
  current = effect;
  try {
    effect.run();
  } finally {
    current = before;
  }
}

/** @param {Effect} effect */
function schedule(effect) {
  if (effect.isDue) return;
  effect.isDue = true;
  if (!due.size) soon(flush);
  due.add(effect);
}

/**
 * A tab in the background has no frames.
 * @param {() => void} work
 */
function soon(work) {
  if (document.hidden) setTimeout(work, 200);
  else requestAnimationFrame(work);
}

function flush() {
  const now = [...due];
  due.clear();
  for (const effect of now) {
    effect.isDue = false;
    execute(effect);
  }
}
