// The box on the photo: the part to search for, drawn, moved and resized with a pointer or the keyboard.
//
// A box is [left, top, right, bottom] in shares of the photo. A finger that swipes over the photo scrolls the page, so
// with touch a box is not drawn but begun with the button, then moved and pulled at its corners.

import { element } from "./dom.js";

const LEAST = 0.05;
const STEP = 0.02;
const BEGIN = [0.2, 0.2, 0.8, 0.8];
const QUIET_MS = 400; // after the last arrow key, before the search
const ARROWS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };

const frame = element("frame");
const node = element("box");
let box = null;
let changed = () => {};
let waiting = 0;

/** Calls `told` with the box, or null, whenever a person has changed it. */
export function onBox(told) {
  changed = told;
}

export function showBox(given) {
  clearTimeout(waiting);
  box = given;
  node.hidden = element("whole").hidden = box === null;
  element("part").hidden = box !== null;
  if (!box) return;
  ["left", "top", "right", "bottom"].forEach((side, at) => node.style.setProperty(`--${side}`, box[at]));
  const [left, top, right, bottom] = box.map((share) => Math.round(share * 100));
  node.setAttribute("aria-label", `Part to search for: ${left} to ${right} % across, ${top} to ${bottom} % down`);
}

function settle(given) {
  showBox(given && given.map((share) => Number(share.toFixed(3))));
  changed(box);
}

// --- with a pointer -------------------------------------------------------------------------------------

const clamp = (value, least, most) => Math.min(Math.max(value, least), most);

function shareAt(event) {
  const { left, top, width, height } = frame.getBoundingClientRect();
  return [clamp((event.clientX - left) / width, 0, 1), clamp((event.clientY - top) / height, 0, 1)];
}

const between = ([a, b], [c, d]) => [Math.min(a, c), Math.min(b, d), Math.max(a, c), Math.max(b, d)];

function movedTo([left, top], [x, y, right, bottom]) {
  const [width, height] = [right - x, bottom - y];
  const [newLeft, newTop] = [clamp(left, 0, 1 - width), clamp(top, 0, 1 - height)];
  return [newLeft, newTop, newLeft + width, newTop + height];
}

/** What following the pointer does, by where it went down: pull a corner, move the box, or draw a new one. */
function gesture(event) {
  const start = shareAt(event);
  const { corner } = event.target.dataset;
  if (corner) {
    const fixed = [corner.includes("w") ? box[2] : box[0], corner.includes("n") ? box[3] : box[1]];
    return (point) => between(fixed, point);
  }
  if (event.target === node) {
    const held = box;
    return ([x, y]) => movedTo([held[0] + x - start[0], held[1] + y - start[1]], held);
  }
  return event.pointerType === "touch" ? null : (point) => between(start, point);
}

frame.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || !frame.dataset.parts) return;
  const follow = gesture(event);
  if (!follow) return;
  event.preventDefault(); // no selection of text, no ghost of the picture
  const before = box;
  const ended = new AbortController();
  const { signal } = ended;
  frame.toggleAttribute("data-drawing", before === null); // it must not grow under the pointer
  signal.addEventListener("abort", () => frame.removeAttribute("data-drawing"));
  frame.setPointerCapture(event.pointerId);
  frame.addEventListener("pointermove", (moved) => showBox(follow(shareAt(moved))), { signal });
  frame.addEventListener("pointercancel", () => { ended.abort(); showBox(before); }, { signal });
  frame.addEventListener("pointerup", () => {
    ended.abort();
    const drawn = box && box[2] - box[0] >= LEAST && box[3] - box[1] >= LEAST;
    if (drawn && box !== before) settle(box);
    else showBox(before); // a click, or a slip
  }, { signal });
});

// --- with the keyboard ----------------------------------------------------------------------------------

node.addEventListener("keydown", (event) => {
  if (event.key === "Escape" || event.key === "Delete") {
    clearBox();
  } else if (event.key in ARROWS) {
    const [x, y] = ARROWS[event.key];
    const [left, top, right, bottom] = box;
    showBox(event.shiftKey
      ? [left, top, clamp(right + x, left + LEAST, 1), clamp(bottom + y, top + LEAST, 1)]
      : movedTo([left + x, top + y], box));
    waiting = setTimeout(() => settle(box), QUIET_MS);
  } else {
    return;
  }
  event.preventDefault();
});

function clearBox() {
  settle(null);
  element("part").focus();
}

element("part").addEventListener("click", () => {
  settle(BEGIN);
  node.focus();
});
element("whole").addEventListener("click", clearBox);
