// Fence timeline: steps in flight, the fence behind them, and the blocks that wait for it. One moment is one unit of width.

const GUTTER = 92;
const LEAST_SPAN = 12;
const USUAL_SPAN = 90;
const BAR_FROM = 2.2;
const AXIS = 15;
const MARK_TRACK = 17;
const FENCE_TRACK = 16;
const STEP_LANE = 15;
const WAIT_LANE = 15;
const MARK_ORDER = [ROWS.FINISHED, ROWS.FAILED, ROWS.GUARD, ROWS.CONFIG, ROWS.FAULT, ROWS.LOAD_FAILED, ROWS.PREEMPTED];

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-timeline");
  const aside = el("span", { class: "lab-aside", "data-testid": "about-time" });
  const sheetBox = el("div", { class: "lab-sheet" });
  const line = { store, from: 0, to: LEAST_SPAN, chosen: false, tip: null, derived: null };
  const tool = (text, title, click) => {
    const button = el("button", { text, title, "aria-label": title, on: { click } });
    takeKeys(button, store, { " ": () => click() });
    return button;
  };
  const tools = el("span", { class: "lab-tools" },
    tool("−", "zoom out (−)", () => zoom(line, 1.6)),
    tool("+", "zoom in (+)", () => zoom(line, 1 / 1.6)),
    tool("all", "the whole history (0)", () => fit(line)));
  root.append(el("div", { class: "lab-panel" },
    el("div", { class: "lab-title" }, "Steps, fence and deferred frees", aside, tools), sheetBox));
  const spoken = new SpokenLine(root);
  line.theme = new Theme(root, () => forget(line), signal);
  const label = "steps in flight, the fence and the blocks that wait for it, over time";
  line.sheet = new Sheet(sheetBox, { "aria-label": label }, () => forget(line), signal);
  takeKeys(line.sheet.canvas, store, {
    "+": () => zoom(line, 1 / 1.6),
    "=": () => zoom(line, 1 / 1.6),
    "-": () => zoom(line, 1.6),
    "0": () => fit(line),
    PageUp: () => pan(line, -0.5),
    PageDown: () => pan(line, 0.5),
  });
  followPointer(line);
  store.on("history", () => (line.derived = null), signal);
  store.on("selection", () => (line.picture = null), signal);
  store.view(() => {
    if (line.sheet.width < GUTTER + 40) return;
    line.derived ??= derive(store.history);
    keepInSight(line);
    draw(line);
    const text = line.tip ?? momentWords(line);
    setText(aside, text);
    spoken.say(text);
  }, signal);
}

function forget(line) {
  line.picture = null;
  line.store.invalidate();
}

// ---- what is drawn from: per frame counts, and a lane for each wait

function derive(history) {
  const size = history.numFrames + 1;
  const inFlight = new Int32Array(size), waiting = new Int32Array(size);
  const { steps, waits } = history;
  for (let i = 0; i < history.numSteps; i++) {
    if (!steps.tokens.at(i)) continue;
    inFlight[steps.frame.at(i)]++;
    if (steps.delivered.at(i) >= 0) inFlight[steps.delivered.at(i)]--;
  }
  for (let i = 0; i < waits.request.length; i++) {
    waiting[waits.released.at(i)] += waits.blocks.at(i);
    if (waits.returned.at(i) >= 0) waiting[waits.returned.at(i)] -= waits.blocks.at(i);
  }
  for (let f = 1; f < size; f++) {
    inFlight[f] += inFlight[f - 1];
    waiting[f] += waiting[f - 1];
  }
  return {
    inFlight,
    waiting,
    numFrames: history.numFrames,
    steps: lanesOf(history.numFrames, steps.frame, steps.delivered, (i) => !steps.tokens.at(i)),
    waits: lanesOf(history.numFrames, waits.released, waits.returned, () => false),
  };
}

/** The first lane that is free when each span begins; a span without end (-1) keeps its lane. longest: in frames. */
function lanesOf(numFrames, begin, end, skip) {
  const lanes = new Int32Array(begin.length).fill(-1), busyUntil = [];
  let longest = 0;
  for (let i = 0; i < begin.length; i++) {
    if (skip(i)) continue;
    let lane = busyUntil.findIndex((until) => until <= begin.at(i));
    if (lane < 0) lane = busyUntil.length;
    busyUntil[lane] = end.at(i) < 0 ? Infinity : end.at(i);
    lanes[i] = lane;
    longest = Math.max(longest, (end.at(i) < 0 ? numFrames : end.at(i)) - begin.at(i));
  }
  return { lanes, count: busyUntil.length, longest };
}

/** Calls visit(i) for the spans that may reach into the window. */
function eachSpan(line, begin, longest, visit) {
  for (let i = firstFrom(begin, line.from - longest); i < begin.length && begin.at(i) <= line.to; i++) visit(i);
}

// ---- the window

function lastOf(line) {
  return Math.max(LEAST_SPAN, line.store.history.numFrames);
}

function setWindow(line, from, span) {
  const end = lastOf(line);
  line.chosen = true;
  line.showsAll = span >= end;
  span = Math.max(LEAST_SPAN, Math.min(span, end));
  line.from = Math.max(0, Math.min(from, end - span));
  line.to = line.from + span;
  forget(line);
}

function zoom(line, factor, at = line.store.position + 0.5) {
  const span = line.to - line.from, next = Math.max(LEAST_SPAN, Math.min(span * factor, lastOf(line)));
  setWindow(line, at - ((at - line.from) * next) / span, next);
}

function fit(line) {
  setWindow(line, 0, lastOf(line));
}

function pan(line, share) {
  setWindow(line, line.from + share * (line.to - line.from), line.to - line.from);
}

/** Until somebody zooms, the window grows with the history up to a usual span. It follows the position. */
function keepInSight(line) {
  const { position } = line.store, end = lastOf(line), grew = line.seenFrames !== line.derived.numFrames;
  if (grew && (!line.chosen || line.showsAll)) line.to = line.from + (line.showsAll ? end : Math.min(USUAL_SPAN, end));
  const span = line.to - line.from, moved = line.seenPosition !== position;
  if (moved && (position < line.from || position >= line.to - 1)) {
    line.from = position - span * (position < line.from ? 0.15 : 0.85);
  }
  line.from = Math.max(0, Math.min(line.from, end - span));
  line.to = line.from + span;
  line.seenFrames = line.derived.numFrames;
  line.seenPosition = position;
}

// ---- drawing

function draw(line) {
  const { sheet, store } = line;
  const key = `${line.from}/${line.to}/${sheet.width}x${sheet.height}@${sheet.scale}/${line.derived.numFrames}/${store.request}/${store.flag?.frame}`;
  if (!line.picture || line.pictureKey !== key) {
    line.pictureKey = key;
    line.picture = paint(line);
  }
  const ctx = sheet.begin();
  ctx.drawImage(line.picture, 0, 0, sheet.width, sheet.height);
  drawCursor(ctx, line);
}

function paint(line) {
  const { sheet, theme } = line;
  const picture = line.canvas ?? (line.canvas = document.createElement("canvas"));
  picture.width = sheet.canvas.width;
  picture.height = sheet.canvas.height;
  const ctx = picture.getContext("2d");
  ctx.setTransform(sheet.scale, 0, 0, sheet.scale, 0, 0);
  layOut(line);
  paintTracks(ctx, line);
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, 0, sheet.width - GUTTER, sheet.height);
  ctx.clip();
  if (line.perFrame >= BAR_FROM) {
    paintSteps(ctx, line);
    paintFence(ctx, line);
    paintWaits(ctx, line);
  } else paintCounts(ctx, line);
  paintMarks(ctx, line);
  ctx.restore();
  paintAxis(ctx, line, theme);
  return picture;
}

function layOut(line) {
  const { sheet, derived } = line;
  const stepLanesShown = Math.max(2, Math.min(derived.steps.count, 4));
  const steps = MARK_TRACK, fence = steps + stepLanesShown * STEP_LANE + 4, waits = fence + FENCE_TRACK + 4;
  const bottom = sheet.height - AXIS;
  line.tracks = { marks: 0, steps, fence, waits, bottom, stepLanesShown };
  line.waitLanesShown = Math.max(1, Math.floor((bottom - waits) / WAIT_LANE));
  line.perFrame = (sheet.width - GUTTER) / (line.to - line.from);
  line.x = (frame) => GUTTER + (frame - line.from) * line.perFrame;
}

function paintTracks(ctx, line) {
  const { theme, tracks, sheet, store } = line;
  ctx.font = `11px ${theme.font}`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  ctx.fillStyle = theme.ink2;
  const off = !store.history.frames.fenced.at(store.lastFrame);
  const names = [["events", tracks.marks, tracks.steps], ["steps in flight", tracks.steps, tracks.fence],
    [off ? "fence (off)" : "fence", tracks.fence, tracks.waits], ["deferred frees", tracks.waits, tracks.bottom]];
  names.forEach(([name, top, bottom], i) => {
    ctx.fillStyle = theme.ink2;
    ctx.fillText(name, GUTTER - 8, Math.min((top + bottom) / 2, top + 24));
    ctx.fillStyle = theme.line;
    if (i) ctx.fillRect(0, top - 2, sheet.width, 1);
  });
  ctx.fillRect(GUTTER - 1, 0, 1, tracks.bottom);
}

/** Index of the first of ascending numbers that is at least `value`. */
function firstFrom(numbers, value) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers.at(middle) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function paintSteps(ctx, line) {
  const { theme, tracks, derived, store } = line, { steps } = store.history, { lanes } = derived.steps;
  const plain = mix(theme.ink2, theme.paper, store.request >= 0 ? 0.78 : 0.6);
  ctx.font = `10px ${theme.font}`;
  ctx.textAlign = "left";
  eachSpan(line, steps.frame, derived.steps.longest, (i) => {
    if (lanes[i] < 0) return;
    const end = steps.delivered.at(i) < 0 ? derived.numFrames : steps.delivered.at(i);
    const x = line.x(steps.frame.at(i)), width = Math.max(1.5, line.x(end) - x - 1);
    const y = tracks.steps + Math.min(lanes[i], tracks.stepLanesShown - 1) * STEP_LANE;
    const has = store.request >= 0 && stepHas(store.history, i, store.request);
    ctx.fillStyle = has ? requestFill(ctx, theme, store.request) : plain;
    ctx.fillRect(x, y, width, STEP_LANE - 3);
    ctx.fillStyle = has ? inkOn(store.request) : theme.ink;
    number(ctx, steps.number.at(i), x + 4, y + (STEP_LANE - 3) / 2 + 0.5, width - 5);
  });
}


/** A number, if there is room for it. */
function number(ctx, value, x, y, room) {
  const text = String(value);
  if (text.length * 6 <= room) ctx.fillText(text, x, y);
}

function stepHas(history, step, wanted) {
  let found = false;
  history.eachScheduled(step, (request) => (found ||= request === wanted));
  return found;
}

/** Stretches between two advances, each with the number the fence stands at, where there is room for it. */
function paintFence(ctx, line) {
  const { theme, tracks, derived, store } = line, { processed, fenced } = store.history.frames;
  const start = Math.max(0, Math.floor(line.from)), end = Math.min(derived.numFrames, Math.ceil(line.to));
  const light = mix(theme.accent, theme.paper, 0.8), height = FENCE_TRACK - 4, labels = [];
  for (let f = start; f < end; ) {
    let next = f + 1;
    while (next < end && processed.at(next) === processed.at(f)) next++;
    const x = line.x(f);
    if (fenced.at(next - 1)) {
      ctx.fillStyle = light;
      ctx.fillRect(x, tracks.fence, line.x(next) - x - 1, height);
      ctx.fillStyle = theme.accent;
      ctx.fillRect(x, tracks.fence - 1, 2, height + 2);
      labels.push([x + 5, String(processed.at(f))]);
    }
    f = next;
  }
  ctx.font = `10px ${theme.font}`;
  ctx.textAlign = "left";
  let free = GUTTER;
  for (const [x, text] of labels) {
    const width = ctx.measureText(text).width;
    if (x < free) continue;
    ctx.fillStyle = theme.paper;
    ctx.fillRect(x - 2, tracks.fence - 1, width + 4, height + 2);
    ctx.fillStyle = light;
    ctx.fillRect(x - 2, tracks.fence, width + 4, height);
    ctx.fillStyle = theme.ink;
    ctx.fillText(text, x, tracks.fence + height / 2 + 0.5);
    free = x + width + 14;
  }
}

function paintWaits(ctx, line) {
  const { theme, derived, store } = line, { waits } = store.history;
  ctx.font = `10px ${theme.font}`;
  ctx.textAlign = "left";
  eachSpan(line, waits.released, derived.waits.longest, (i) => {
    const box = waitBox(line, i);
    if (box.x + box.width < GUTTER) return;
    const request = waits.request.at(i), dim = store.request >= 0 && store.request !== request;
    ctx.globalAlpha = dim ? 0.35 : 1;
    ctx.fillStyle = requestFill(ctx, theme, request, true);
    ctx.fillRect(box.x, box.y, box.width, WAIT_LANE - 3);
    ctx.fillStyle = requestFill(ctx, theme, request);
    ctx.fillRect(box.x, box.y, 3, WAIT_LANE - 3);
    ctx.fillStyle = theme.ink;
    const { id } = store.history.requests[request], blocks = plural(waits.blocks.at(i), "block");
    const room = Math.floor((box.width - 8) / 5.4);
    const text = [`${id} · ${blocks} until ${waits.fence.at(i)}`, `${id} · ${blocks}`].find((each) => each.length <= room) ?? id;
    if (room > 2) ctx.fillText(shorten(text, room), box.x + 6, box.y + (WAIT_LANE - 3) / 2 + 0.5);
    ctx.globalAlpha = 1;
  });
  if (!waits.request.length) hint(ctx, line, "none: no blocks had to wait");
}

function hint(ctx, line, text) {
  ctx.fillStyle = line.theme.ink2;
  ctx.textAlign = "left";
  ctx.fillText(text, GUTTER + 8, line.tracks.waits + 10);
}

function waitBox(line, i) {
  const { derived, store, tracks } = line, { waits } = store.history;
  const end = waits.returned.at(i) < 0 ? derived.numFrames : waits.returned.at(i);
  const x = line.x(waits.released.at(i));
  const lane = Math.min(derived.waits.lanes[i], line.waitLanesShown - 1);
  return { x, y: tracks.waits + lane * WAIT_LANE, width: Math.max(2, line.x(end) - x - 1) };
}

/** Too many to draw one by one: the most there were within each pixel. */
function paintCounts(ctx, line) {
  const { sheet, theme, tracks, derived, store } = line, { frames } = store.history;
  const width = sheet.width - GUTTER;
  const tracksOf = [
    [(f) => derived.inFlight[f], tracks.steps, tracks.fence - 6, mix(theme.ink2, theme.paper, 0.35), "steps"],
    [(f) => frames.newest.at(f) - frames.processed.at(f), tracks.fence, tracks.waits - 6, theme.accent, "steps behind"],
    [(f) => derived.waiting[f], tracks.waits, tracks.bottom - 2, "#d55e00", "blocks"],
  ];
  for (const [value, top, bottom, colour, unit] of tracksOf) {
    const most = new Float64Array(width);
    let highest = 0;
    for (let x = 0; x < width; x++) {
      const start = Math.floor(line.from + x / line.perFrame);
      const end = Math.min(derived.numFrames, Math.max(start + 1, Math.floor(line.from + (x + 1) / line.perFrame)));
      for (let f = start; f < end; f++) most[x] = Math.max(most[x], value(f));
      highest = Math.max(highest, most[x]);
    }
    ctx.fillStyle = colour;
    const scale = (bottom - top) / Math.max(1, highest);
    for (let x = 0; x < width; x++) ctx.fillRect(GUTTER + x, bottom - most[x] * scale, 1, most[x] * scale);
    label(ctx, theme, `up to ${highest.toLocaleString("en")} ${unit}`, GUTTER + 4, top + 6);
  }
}

function label(ctx, theme, text, x, y) {
  ctx.font = `10px ${theme.font}`;
  ctx.textAlign = "left";
  ctx.fillStyle = theme.paper;
  ctx.globalAlpha = 0.75;
  ctx.fillRect(x - 2, y - 6, ctx.measureText(text).width + 4, 12);
  ctx.globalAlpha = 1;
  ctx.fillStyle = theme.ink;
  ctx.fillText(text, x, y);
}

function paintMarks(ctx, line) {
  const { theme, tracks, store } = line, { marks, rows } = store.history;
  ctx.font = `10px ${theme.font}`;
  ctx.textAlign = "center";
  if (store.flag) {
    ctx.fillStyle = theme.alarm;
    ctx.fillRect(line.x(store.flag.frame), 0, 1, tracks.bottom);
    ctx.font = `bold 13px ${theme.font}`;
    ctx.fillText(store.flag.text, line.x(store.flag.frame) + 8, tracks.steps + 6);
    ctx.font = `10px ${theme.font}`;
  }
  const kinds = new Map();
  for (let i = firstFrom({ length: marks.length, at: (m) => rows.frame.at(marks.at(m)) }, line.from); i < marks.length; i++) {
    const row = marks.at(i), frame = rows.frame.at(row);
    if (frame > line.to) break;
    const place = line.perFrame >= 5 ? frame : Math.floor((line.x(frame) - GUTTER) / 5);
    if (!kinds.has(place)) kinds.set(place, { frame, seen: new Set() });
    kinds.get(place).seen.add(rows.kind.at(row));
  }
  for (const { frame, seen } of kinds.values()) paintSigns(ctx, line, frame, seen);
}

/** The signs of one moment, the weightiest first, as many as there is room for. */
function paintSigns(ctx, line, frame, seen) {
  const { theme, tracks } = line, room = Math.max(1, Math.floor(line.perFrame / 10));
  const shown = [...seen].sort((a, b) => MARK_ORDER.indexOf(b) - MARK_ORDER.indexOf(a)).slice(0, room);
  shown.forEach((kind, i) => {
    ctx.fillStyle = markColour(theme, kind);
    ctx.fillText(MARK_OF.get(kind).sign, line.x(frame + 0.5) + (i - (shown.length - 1) / 2) * 10, tracks.marks + MARK_TRACK / 2 - 1);
  });
}

function paintAxis(ctx, line, theme) {
  const { sheet, tracks, store, derived } = line, { steps } = store.history;
  ctx.fillStyle = theme.line;
  ctx.fillRect(GUTTER, tracks.bottom, sheet.width - GUTTER, 1);
  ctx.font = `10px ${theme.font}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  let rightmost = -Infinity;
  const perStep = line.perFrame * Math.max(1, derived.numFrames / Math.max(1, store.history.numSteps));
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000].find((n) => n * perStep >= 34) ?? 50000;
  for (let i = firstFrom(steps.frame, line.from); i < store.history.numSteps; i++) {
    const x = line.x(steps.frame.at(i));
    if (x > sheet.width) break;
    const label = steps.number.at(i);
    if (label % every) continue;
    ctx.fillStyle = theme.line;
    ctx.fillRect(Math.round(x), tracks.bottom, 1, 3);
    ctx.fillStyle = theme.ink2;
    if (x > rightmost && x > GUTTER + 6 && x < sheet.width - 10) ctx.fillText(`${label}`, x, tracks.bottom + 9);
    rightmost = Math.max(rightmost, x + 20);
  }
  ctx.textAlign = "right";
  ctx.fillStyle = theme.ink2;
  ctx.fillText("step", GUTTER - 8, tracks.bottom + 8);
}

function drawCursor(ctx, line) {
  const { theme, sheet, store, tracks } = line;
  const x = line.x(store.position + 1);
  if (x >= GUTTER && x < sheet.width) {
    ctx.fillStyle = theme.paper;
    ctx.globalAlpha = 0.6;
    ctx.fillRect(x, 0, sheet.width - x, tracks.bottom);
    ctx.globalAlpha = 1;
  }
  if (x < GUTTER || x > sheet.width) return;
  ctx.fillStyle = theme.accent;
  ctx.fillRect(Math.min(x, sheet.width - 1) - 1, 0, 2, tracks.bottom);
}

// ---- pointing

function followPointer(line) {
  const canvas = line.sheet.canvas;
  let drag = null;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    canvas.focus();
    drag = { ...at(event), from: line.from, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    const point = at(event);
    if (drag && event.buttons) {
      if (Math.abs(point.x - drag.x) > 3) drag.moved = true;
      if (drag.moved) setWindow(line, drag.from - (point.x - drag.x) / line.perFrame, line.to - line.from);
      return;
    }
    showTip(line, point);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) click(line, at(event));
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => showTip(line, null));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return;
    event.preventDefault();
    if (event.shiftKey) pan(line, Math.sign(event.deltaY || event.deltaX) * 0.1);
    else zoom(line, event.deltaY > 0 ? 1.25 : 0.8, line.from + (at(event).x - GUTTER) / line.perFrame);
  }, { passive: false });
}

function click(line, point) {
  const { store } = line, found = itemAt(line, point);
  if (found?.request >= 0) store.select({ request: store.request === found.request ? -1 : found.request });
  else if (point.x >= GUTTER) store.moveTo(found?.frame ?? Math.floor(line.from + (point.x - GUTTER) / line.perFrame));
}

function showTip(line, point) {
  const found = point && line.tracks ? itemAt(line, point) : null;
  const text = found?.text ?? null;
  line.sheet.canvas.style.cursor = found ? "pointer" : "default";
  if (text === line.tip) return;
  line.tip = text;
  line.store.invalidate();
}

/** What is drawn at a point: {text, frame} or {text, request}. */
function itemAt(line, { x, y }) {
  const { tracks, store } = line, { history } = store;
  if (x < GUTTER || y > tracks.bottom) return null;
  const frame = Math.floor(line.from + (x - GUTTER) / line.perFrame);
  if (frame < 0 || frame >= history.numFrames) return null;
  if (y < tracks.steps) return markAt(line, x);
  if (line.perFrame < BAR_FROM) return { text: countsAt(line, frame), frame };
  if (y < tracks.fence) return stepBarAt(line, frame, y);
  if (y < tracks.waits) return { text: fenceWords(history, frame), frame };
  return waitAt(line, x, y);
}

function markAt(line, x) {
  const { history } = line.store, { marks, rows } = history;
  const near = [];
  for (let i = firstFrom({ length: marks.length, at: (m) => rows.frame.at(marks.at(m)) }, line.from); i < marks.length; i++) {
    const distance = line.x(rows.frame.at(marks.at(i)) + 0.5) - x;
    if (distance > 5) break;
    if (distance > -5) near.push(marks.at(i));
  }
  if (!near.length) return null;
  const shown = near.slice(0, 3).map((row) => describeRow(history, history.row(row)));
  if (near.length > 3) shown.push(`and ${near.length - 3} more`);
  return { text: `step ${history.frames.step.at(rows.frame.at(near[0]))}: ${shown.join("; ")}`, frame: rows.frame.at(near[0]) };
}

function countsAt(line, frame) {
  const { history } = line.store, { derived } = line;
  const waiting = `${plural(derived.waiting[frame], "block")} behind the fence`;
  return `step ${history.frames.step.at(frame)}: ${plural(derived.inFlight[frame], "step")} in flight, ${waiting}`;
}

function stepBarAt(line, frame, y) {
  const { history } = line.store, { steps } = history, { tracks } = line;
  const lane = Math.floor((y - tracks.steps) / STEP_LANE);
  const index = history.inFlight(frame).find((i) => line.derived.steps.lanes[i] === lane);
  if (index === undefined) return null;
  const seq = steps.seq.at(index), delivered = steps.delivered.at(index);
  const parts = [`step ${steps.number.at(index)}${seq ? ` (number ${seq} at the fence)` : ""}`,
    `${plural(history.numScheduled(index), "request")}, ${plural(steps.tokens.at(index), "token")}`,
    delivered < 0 ? "still in flight" : `processed during step ${history.frames.step.at(delivered)}`];
  return { text: parts.join(" · "), frame: steps.frame.at(index) };
}

function waitAt(line, x, y) {
  const { history } = line.store, { waits } = history;
  let found = null;
  eachSpan(line, waits.released, line.derived.waits.longest, (i) => {
    const box = waitBox(line, i);
    if (x < box.x || x > box.x + box.width || y < box.y || y >= box.y + WAIT_LANE) return;
    found = { text: waitWords(history, i), request: waits.request.at(i) };
  });
  return found;
}

function waitWords(history, i) {
  const { waits, requests, words, frames } = history, returned = waits.returned.at(i);
  const what = `${plural(waits.blocks.at(i), "block")} of ${requests[waits.request.at(i)].id} (${words[waits.reason.at(i)]})`;
  const since = `let go in step ${frames.step.at(waits.released.at(i))}`;
  const until = returned < 0 ? "still there" : `back in the pool in step ${frames.step.at(returned)}`;
  return `${what}: ${since}, wait until the fence reaches ${waits.fence.at(i)}, ${until}`;
}

function momentWords({ store, derived }) {
  const { history, position } = store;
  const inFlight = history.inFlight(position).map((i) => history.steps.number.at(i));
  const parts = [inFlight.length ? `in flight: ${inFlight.join(", ")}` : "nothing in flight"];
  if (history.frames.fenced.at(position)) parts.push(`fence at ${history.frames.processed.at(position)}`);
  if (derived.waiting[position]) parts.push(`${plural(derived.waiting[position], "block")} wait behind it`);
  return parts.join(" · ");
}

export default { render };
