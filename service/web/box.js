// The box on the photo: the part to search with, drawn, moved and resized by pointer or keyboard.
//
// A box is [left, top, right, bottom] as fractions of the photo. With touch, swiping over the photo scrolls the page,
// so a box is not drawn but created by the button, then moved and resized at its corners.

import { element } from "./dom.js";

const MIN_SIZE = 0.05;
const STEP = 0.02;
const INITIAL_BOX = [0.2, 0.2, 0.8, 0.8];
const KEY_DELAY_MS = 400; // between the last arrow key and the search
const ARROWS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };

const frame = element("frame");
const node = element("box");
let box = null;
let onChange = () => {};
let timer = 0;

/** Calls `callback` with the box, or null, whenever the user has changed it. */
export function onBoxChange(callback) {
  onChange = callback;
}

export function showBox(newBox) {
  clearTimeout(timer);
  box = newBox;
  node.hidden = element("whole-photo").hidden = box === null;
  element("select-part").hidden = box !== null;
  if (!box) return;
  ["left", "top", "right", "bottom"].forEach((side, at) => node.style.setProperty(`--${side}`, box[at]));
  const [left, top, right, bottom] = box.map((fraction) => Math.round(fraction * 100));
  node.setAttribute("aria-label", `Selected part: ${left} to ${right} % across, ${top} to ${bottom} % down`);
}

function commit(newBox) {
  showBox(newBox && newBox.map((fraction) => Number(fraction.toFixed(3))));
  onChange(box);
}

// --- pointer --------------------------------------------------------------------------------------------

const clamp = (value, min, max) => Math.min(Math.max(value, min), max);

function position(event) {
  const { left, top, width, height } = frame.getBoundingClientRect();
  return [clamp((event.clientX - left) / width, 0, 1), clamp((event.clientY - top) / height, 0, 1)];
}

const boxBetween = ([a, b], [c, d]) => [Math.min(a, c), Math.min(b, d), Math.max(a, c), Math.max(b, d)];

function moveBox([left, top], [x, y, right, bottom]) {
  const [width, height] = [right - x, bottom - y];
  const [newLeft, newTop] = [clamp(left, 0, 1 - width), clamp(top, 0, 1 - height)];
  return [newLeft, newTop, newLeft + width, newTop + height];
}

/** Returns the function from pointer position to box, by where the pointer went down: resize, move or draw. */
function startGesture(event) {
  const start = position(event);
  const { corner } = event.target.dataset;
  if (corner) {
    const fixed = [corner.includes("w") ? box[2] : box[0], corner.includes("n") ? box[3] : box[1]];
    return (point) => boxBetween(fixed, point);
  }
  if (event.target === node) {
    const original = box;
    return ([x, y]) => moveBox([original[0] + x - start[0], original[1] + y - start[1]], original);
  }
  return event.pointerType === "touch" ? null : (point) => boxBetween(start, point);
}

frame.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !frame.dataset.parts) return;
  const boxAt = startGesture(event);
  if (!boxAt) return;
  event.preventDefault(); // no text selection, no dragging of the image
  const before = box;
  const ended = new AbortController();
  const { signal } = ended;
  frame.toggleAttribute("data-drawing", before === null); // the frame must not grow under the pointer
  signal.addEventListener("abort", () => frame.removeAttribute("data-drawing"));
  frame.setPointerCapture(event.pointerId);
  frame.addEventListener("pointermove", (move) => showBox(boxAt(position(move))), { signal });
  frame.addEventListener("pointercancel", () => { ended.abort(); showBox(before); }, { signal });
  frame.addEventListener("pointerup", () => {
    ended.abort();
    const isLargeEnough = box && box[2] - box[0] >= MIN_SIZE && box[3] - box[1] >= MIN_SIZE;
    if (isLargeEnough && box !== before) commit(box);
    else showBox(before); // a click, or an accidental drag
  }, { signal });
});

// --- keyboard -------------------------------------------------------------------------------------------

node.addEventListener("keydown", (event) => {
  if (event.key === "Escape" || event.key === "Delete") {
    clearBox();
  } else if (event.key in ARROWS) {
    const [x, y] = ARROWS[event.key];
    const [left, top, right, bottom] = box;
    showBox(event.shiftKey
      ? [left, top, clamp(right + x, left + MIN_SIZE, 1), clamp(bottom + y, top + MIN_SIZE, 1)]
      : moveBox([left + x, top + y], box));
    timer = setTimeout(() => commit(box), KEY_DELAY_MS);
  } else {
    return;
  }
  event.preventDefault();
});

function clearBox() {
  commit(null);
  element("select-part").focus();
}

element("select-part").addEventListener("click", () => {
  commit(INITIAL_BOX);
  node.focus();
});
element("whole-photo").addEventListener("click", clearBox);
