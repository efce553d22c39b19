// What every view needs: elements, colours and patterns, canvases, keys, the hub. Put before each view's own file.
//
// Owns: the look of a request and of a block's state, and the keys that move through history.
// Knows nothing about: any one view.
// Invariants: text reaches the page as text nodes only. A request is told by colour and pattern, never by colour alone.

const FLAGS = LAB.flags;
const ROWS = LAB.rows;

/** An element. properties: attributes, or `text`, `on`: listeners, `style`: properties. */
function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

const ICONS = {
  first: "M3 3h2v10H3z M13 3v10L6 8z",
  back: "M11 3v10L4 8z",
  next: "M5 3v10l7-5z",
  last: "M11 3h2v10h-2z M3 3v10l7-5z",
  play: "M2 3v10l6-5z M8 3v10l6-5z",
  stop: "M4 3h3v10H4z M9 3h3v10H9z",
};
const SVG = "http://www.w3.org/2000/svg";

/** One of ICONS, in a box of 16 by 16. */
function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "lab-icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(SVG, "path"));
  setIcon(svg, name);
  return svg;
}

function setIcon(svg, name) {
  svg.firstChild.setAttribute("d", ICONS[name]);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const inEnglish = new Intl.NumberFormat("en");

function counted(count) {
  return inEnglish.format(count);
}

function plural(count, one, many = `${one}s`) {
  return `${counted(count)} ${count === 1 ? one : many}`;
}

function shorten(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** The store of the hub that this view shows. */
async function openStore(model, host) {
  return (await host.getWidget(model.get("hub"))).exports;
}

// ---- colours, light and dark

const SETTLED_MS = 250;

/** Colours of the page's theme, read anew when the theme changes: a hidden element has a transition on them, whose
    events tell of any change, whatever caused it (a swap of style sheets ends some with "cancel"). While sheets are
    being swapped the layout can be anything, so that it is done once more when all is quiet. */
class Theme {
  constructor(root, onChange, signal) {
    this.root = root;
    this.probe = el("span", { class: "lab-probe", "aria-hidden": "true" });
    root.append(this.probe);
    this.read();
    const again = () => {
      this.read();
      onChange();
    };
    let timer = 0;
    const changed = () => {
      again();
      clearTimeout(timer);
      timer = setTimeout(again, SETTLED_MS);
    };
    signal.addEventListener("abort", () => clearTimeout(timer));
    for (const event of ["transitionrun", "transitionend", "transitioncancel"]) {
      this.probe.addEventListener(event, changed, { signal });
    }
  }
  read() {
    const style = getComputedStyle(this.root);
    const variable = (name) => style.getPropertyValue(name).trim();
    this.paper = variable("--lab-paper");
    const solid = (name) => `rgb(${toRgb(variable(name), this.paper).join(",")})`;
    this.paper2 = solid("--lab-paper2");
    this.ink = solid("--lab-ink");
    this.ink2 = solid("--lab-ink2");
    this.line = solid("--lab-line");
    this.accent = solid("--lab-accent");
    this.alarm = solid("--lab-alarm");
    this.font = variable("--lab-font");
    this.dark = luminance(toRgb(this.paper)) < 0.3;
    this.patterns = new Map();
  }
}

const colourProbe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const knownRgb = new Map();

/** [r, g, b] of any CSS colour; one that is see-through is laid on `under`. Asking the page is slow: each is asked once. */
function toRgb(colour, under = "#ffffff") {
  const key = `${colour}/${under}`;
  let rgb = knownRgb.get(key);
  if (!rgb) {
    for (const layer of [under, colour]) {
      colourProbe.fillStyle = layer;
      colourProbe.fillRect(0, 0, 1, 1);
    }
    rgb = [...colourProbe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    knownRgb.set(key, rgb);
  }
  return rgb;
}

function luminance([r, g, b]) {
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
}

function mix(a, b, share) {
  const [x, y] = [toRgb(a), toRgb(b)];
  return `rgb(${x.map((v, i) => Math.round(v * (1 - share) + y[i] * share)).join(",")})`;
}

function requestColour(index) {
  return LAB.palette[index % LAB.palette.length];
}

function requestPattern(index) {
  return LAB.patterns[index % LAB.patterns.length];
}

/** How text stands out on a request's colour. */
function inkOn(index) {
  return luminance(toRgb(requestColour(index))) > 0.5 ? "#1a1a1a" : "#ffffff";
}

/** A fill for what a request holds: its colour with its pattern over it. faded: for blocks that it has let go. */
function requestFill(ctx, theme, index, faded = false) {
  const key = `${index % LAB.palette.length}/${index % LAB.patterns.length}/${faded}`;
  if (!theme.patterns.has(key)) theme.patterns.set(key, ctx.createPattern(patternTile(theme, index, faded), "repeat"));
  return theme.patterns.get(key);
}

const TILE = 6;

function patternTile(theme, index, faded) {
  const scale = 2, tile = document.createElement("canvas");
  tile.width = tile.height = TILE * scale;
  const ctx = tile.getContext("2d"), size = tile.width;
  const colour = faded ? mix(requestColour(index), theme.paper, 0.68) : requestColour(index);
  ctx.fillStyle = colour;
  ctx.fillRect(0, 0, size, size);
  ctx.strokeStyle = ctx.fillStyle = mix(colour, theme.dark ? "#000000" : "#ffffff", faded ? 0.45 : 0.4);
  ctx.lineWidth = 1.4 * scale;
  drawPattern(ctx, requestPattern(index), size);
  return tile;
}

function drawPattern(ctx, pattern, size) {
  const line = (x1, y1, x2, y2) => {
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
    ctx.stroke();
  };
  if (pattern === "rising") {
    for (const shift of [-size, 0, size]) line(shift, size, shift + size, 0);
  } else if (pattern === "dots") {
    ctx.beginPath();
    ctx.arc(size / 2, size / 2, size / 5, 0, 2 * Math.PI);
    ctx.fill();
  } else if (pattern === "level") line(0, size / 2, size, size / 2);
  else if (pattern === "cross") {
    line(0, size / 2, size, size / 2);
    line(size / 2, 0, size / 2, size);
  }
}

/** A small square in a request's look. */
function swatch(theme, index) {
  const canvas = el("canvas", { class: "lab-swatch", width: 24, height: 24, "aria-hidden": "true" });
  paintSwatch(canvas, theme, index);
  return canvas;
}

function paintSwatch(canvas, theme, index) {
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = requestFill(ctx, theme, index);
  ctx.fillRect(0, 0, 24, 24);
}

// ---- canvases

/** A canvas as wide and high as its box, sharp on every screen. draw() is called after each change of size. */
class Sheet {
  constructor(parent, attributes, draw, signal) {
    this.canvas = el("canvas", { role: "img", ...attributes });
    this.ctx = this.canvas.getContext("2d");
    this.width = this.height = 0;
    this.scale = 1;
    parent.append(this.canvas);
    const observer = new ResizeObserver(() => {
      this.fit();
      draw();
    });
    observer.observe(parent);
    signal.addEventListener("abort", () => observer.disconnect());
    this.fit();
  }
  fit() {
    const box = this.canvas.parentElement.getBoundingClientRect();
    const scale = Math.max(1, window.devicePixelRatio || 1);
    const [width, height] = [Math.floor(box.width), Math.floor(box.height)];
    if (width === this.width && height === this.height && scale === this.scale) return;
    Object.assign(this, { width, height, scale });
    this.canvas.width = Math.max(1, Math.round(width * scale));
    this.canvas.height = Math.max(1, Math.round(height * scale));
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
  }
  begin() {
    this.ctx.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    this.ctx.clearRect(0, 0, this.width, this.height);
    return this.ctx;
  }
}

// ---- for ears: a line that says what the picture shows, once the hand rests

class SpokenLine {
  constructor(parent) {
    this.element = el("div", { class: "lab-spoken", role: "status", "aria-live": "polite" });
    parent.append(this.element);
  }
  say(text) {
    if (text === this.next) return;
    this.next = text;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => setText(this.element, text), 400);
  }
}

// ---- what the kernel answers

/** Commands that change a run; the inject panel shows what came of them, the transport what came of the others. */
const CHANGES = new Set(["inject", "set_option"]);

function showNote(element, note) {
  element.dataset.kind = note?.kind ?? "";
  setText(element, note?.text ?? "");
}

// ---- keys

const MOVES = {
  ArrowLeft: (store, event) => (event.shiftKey ? store.byStep(-1) : store.moveTo(store.position - 1)),
  ArrowRight: (store, event) => (event.shiftKey ? store.byStep(1) : store.forward()),
  Home: (store) => store.moveTo(0),
  End: (store) => store.moveTo(store.lastFrame),
  "[": (store) => store.byMark(-1),
  "]": (store) => store.byMark(1),
  ",": (store) => store.moveTo(store.position - 1),
  ".": (store) => store.forward(),
  " ": (store) => store.emit("play"),
};

/** Let an element take the keys. own: more of them, or others, as {key: (store, event)}. JupyterLab does not see them. */
function takeKeys(element, store, own = {}) {
  element.tabIndex = 0;
  element.dataset.lmSuppressShortcuts = "true";
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = own[event.key] ?? MOVES[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action(store, event);
  });
}

// ---- words

/** "step 7 of 40 · 3 running · 2 of 8 blocks free · fence at 5, newest 7". Twin of lab.views.headline. */
function headline(state, store) {
  return `${stepWords(store)} · ${countWords(state, store)}`;
}

function stepWords({ history, position }) {
  return `step ${counted(history.frames.step.at(position))} of ${counted(history.lastStep)}`;
}

function countWords(state, { history, position }) {
  const counts = queueCounts(state, history);
  return [
    `${counted(counts.running)} running`,
    ...(counts.loading ? [`${counted(counts.loading)} loading`] : []),
    `${counted(counts.waiting)} waiting`,
    `${counted(history.frames.free.at(position))} of ${plural(history.numBlocks - 1, "block")} free`,
    fenceWords(history, position),
  ].join(" · ");
}

function fenceWords(history, frame) {
  const processed = history.frames.processed.at(frame), newest = history.frames.newest.at(frame);
  if (history.frames.fenced.at(frame)) return `fence at ${counted(processed)}, newest ${counted(newest)}`;
  const steps = history.inFlight(frame).map((index) => history.steps.number.at(index));
  return steps.length ? `fence off, ${steps.length === 1 ? "step" : "steps"} ${steps.join(", ")} in flight` : "fence off";
}

const [QUEUE_WAITING, QUEUE_LOADING, QUEUE_RUNNING] = [1, 2, 3];

function queueCounts(state, history) {
  const counts = { waiting: 0, loading: 0, running: 0 };
  for (let i = 0; i < history.requests.length; i++) {
    const queue = state.queue[i];
    if (queue === QUEUE_RUNNING) counts.running++;
    else if (queue === QUEUE_WAITING) counts.waiting++;
    else if (queue === QUEUE_LOADING) counts.loading++;
  }
  return counts;
}

/** What has just happened: "step 7 is decided", "the output of step 5 is processed", "r4 arrives". Twin of lab.views.moment. */
function moment(history, frame) {
  const kind = history.frames.kind.at(frame), step = history.frames.step.at(frame);
  if (kind === LAB.frames.SCHEDULED) return `step ${step} is decided`;
  const rows = history.rowsOf(frame);
  if (kind === LAB.frames.DELIVERED) {
    return `the output of step ${rows.find((row) => row.kind === ROWS.DELIVERED).number} is processed`;
  }
  const added = rows.filter((row) => row.kind === ROWS.ADDED).map((row) => history.nameOf(row.request));
  if (added.length) return `${listed(added)} ${added.length === 1 ? "arrives" : "arrive"}`;
  const other = rows.find((row) => MARK_OF.has(row.kind));
  return other ? describeRow(history, other) : "the run begins";
}

function listed(names) {
  return names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", ");
}

const MARK_OF = new Map(LAB.marks.map(([row, sign, one, many]) => [row, { sign, one, many }]));

const MARK_COLOURS = new Map([
  [ROWS.GUARD, "#0072b2"], [ROWS.PREEMPTED, "#d55e00"], [ROWS.FAULT, "#aa4499"], [ROWS.CONFIG, "#aa4499"],
]);

function markColour(theme, kind) {
  if (kind === ROWS.FINISHED) return theme.ink2;
  const colour = MARK_COLOURS.get(kind) ?? theme.alarm;
  return theme.dark ? mix(colour, "#ffffff", 0.35) : colour;
}

/** A row in words. */
function describeRow(history, row) {
  const name = (ref) => history.nameOf(ref), word = (index) => history.words[index];
  switch (row.kind) {
    case ROWS.FAILED: {
      const why = row.injected ? "injected" : `needs ${row.needed}, ${row.free} free`;
      return `call ${row.call} for slots of ${name(row.request)} fails (${why})`;
    }
    case ROWS.GUARD: {
      const waits = `its blocks wait for ${row.fence}, the fence is at ${row.processed}`;
      return `the guard stops ${name(row.request)}'s retry: victim ${name(row.victim)}, ${waits}`;
    }
    case ROWS.PREEMPTED: {
      const wanted = row.wanted_by && row.wanted_by !== row.request ? ` for ${name(row.wanted_by)}` : "";
      return `${name(row.request)} is preempted${wanted}, ${plural(row.computed, "computed token")} lost`;
    }
    case ROWS.FINISHED:
      return row.reason !== undefined && word(row.reason) === "abort"
        ? `${name(row.request)} is aborted after ${plural(row.tokens, "token")}`
        : `${name(row.request)} finishes (${word(row.reason)}) with ${plural(row.tokens, "token")}`;
    case ROWS.LOAD_FAILED:
      return `a load of ${name(row.request)} fails: ${plural(row.blocks, "block")}, ${plural(row.valid, "token")} valid`;
    case ROWS.FAULT:
      return `fault injected: ${word(row.text)}`;
    case ROWS.CONFIG:
      return `setting changed: ${word(row.text)}`;
    default:
      return "";
  }
}
