// Block map: every block of the pool, from eight with their labels to ten thousand under a lens.

const PATTERNS_FROM = 8;
const LABELS_FROM = 26;
const ROOMY_FROM = 46;
const LARGEST = 88;
const LENS = { cell: 32, columns: 9, rows: 5 };
const LEGEND = [
  ["free", "free"], ["cached", "free, still cached"], ["held", "held"], ["writing", "being written"],
  ["fenced", "behind the fence"], ["loading", "loading"], ["saving", "saving"],
  ["stale", "handed on while still written"],
];

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-blockmap");
  const aside = el("span", { class: "lab-aside" });
  const sheetBox = el("div", { class: "lab-sheet" });
  const about = el("div", { class: "lab-about", "data-testid": "about-block" });
  const lineage = el("div", { class: "lab-lineage", "aria-label": "who held the block" });
  const legend = el("div", { class: "lab-block-legend", "aria-label": "signs in the block map" });
  root.append(el("div", { class: "lab-panel" },
    el("div", { class: "lab-title" }, "Blocks", aside), sheetBox, legend, about, lineage));
  const spoken = new SpokenLine(root);
  const theme = new Theme(root, () => {
    showLegend(legend, theme);
    store.invalidate();
  }, signal);
  showLegend(legend, theme);
  const sheet = new Sheet(sheetBox, { "aria-label": "map of the blocks of the KV cache" }, () => store.invalidate(), signal);
  const map = { store, sheet, theme, hovered: -1, grid: null };
  const writing = new Writers();
  takeKeys(sheet.canvas, store, {
    ArrowLeft: () => moveCursor(map, -1),
    ArrowRight: () => moveCursor(map, 1),
    ArrowUp: () => moveCursor(map, -map.grid.columns),
    ArrowDown: () => moveCursor(map, map.grid.columns),
    Escape: () => store.select({ block: -1 }),
  });
  followPointer(map);
  store.view((state) => {
    writing.read(store);
    map.grid = gridFor(store.history.numBlocks - 1, sheet.width, sheet.height);
    drawMap(map, state, writing);
    const block = map.hovered > 0 ? map.hovered : store.block;
    setText(aside, `${plural(store.history.numBlocks - 1, "block")} of ${plural(store.history.head.config.block_size, "token")}`);
    const text = block > 0 ? describeBlock(store, state, writing, block) : "Point at a block, or click it, to see who held it.";
    setText(about, text);
    if (block > 0) spoken.say(text);
    showLineage(lineage, map, block);
  }, signal);
}

/** Which blocks the steps in flight still write, and which step writes a block for whom. */
class Writers {
  constructor() {
    this.marks = new Uint8Array(0);
  }
  read(store) {
    const { history } = store;
    if (this.marks.length !== history.numBlocks) this.marks = new Uint8Array(history.numBlocks);
    this.marks.fill(0);
    this.history = history;
    this.steps = history.inFlight(store.position);
    for (const step of this.steps) history.eachWritten(step, (request, first, length) => this.marks.fill(1, first, first + length));
  }
  /** [{step, request}], or undefined for a block that nobody writes. */
  of(block) {
    if (!this.marks[block]) return undefined;
    const found = [];
    for (const step of this.steps) {
      this.history.eachWritten(step, (request, first, length) => {
        if (first <= block && block < first + length) found.push({ step: this.history.steps.number.at(step), request });
      });
    }
    return found;
  }
}

// ---- where each block is drawn

/** The largest cells with which all blocks fit; whole pixels where they carry patterns. */
function gridFor(count, width, height) {
  let columns = Math.max(1, Math.floor(width / Math.sqrt((width * height) / count)));
  while (Math.ceil(count / columns) * (width / columns) > height && columns < width) columns++;
  let size = Math.min(LARGEST, width / columns);
  if (size >= PATTERNS_FROM) {
    size = Math.floor(size);
    columns = Math.max(1, Math.floor(width / size));
  }
  return { size, columns, count, gap: size >= 20 ? 3 : size >= PATTERNS_FROM ? 1 : 0 };
}

function cellOf(grid, block) {
  const index = block - 1;
  return [(index % grid.columns) * grid.size, Math.floor(index / grid.columns) * grid.size];
}

function blockAt(grid, x, y) {
  const column = Math.floor(x / grid.size), row = Math.floor(y / grid.size);
  const block = row * grid.columns + column + 1;
  return column >= 0 && column < grid.columns && block >= 1 && block <= grid.count ? block : -1;
}

// ---- drawing

function drawMap(map, state, writing) {
  const { sheet, grid, store } = map, ctx = sheet.begin();
  if (sheet.width < 4) return;
  if (grid.size < PATTERNS_FROM) drawPixels(map, state, writing);
  else {
    for (let block = 1; block <= grid.count; block++) {
      const [x, y] = cellOf(grid, block);
      drawBlock(ctx, map, state, writing, block, x, y, grid.size - grid.gap);
    }
  }
  if (store.block > 0 && store.block <= grid.count) outline(ctx, grid, store.block, map.theme.accent, 2);
  if (map.hovered > 0) outline(ctx, grid, map.hovered, map.theme.ink, 1);
  if (grid.size < PATTERNS_FROM) drawLens(ctx, map, state, writing);
}

function outline(ctx, grid, block, colour, width) {
  const [x, y] = cellOf(grid, block), size = grid.size - grid.gap, out = grid.gap ? 1 : 2;
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.strokeRect(x - out + 0.5, y - out + 0.5, size + 2 * out - 1, size + 2 * out - 1);
}

/** What to draw of a block: who, in which way, and its signs. */
function lookOf(state, writing, block) {
  const flags = state.block_flags[block], owner = state.block_owner[block] - 1;
  const fenced = (flags & FLAGS.FENCED) > 0;
  const writes = writing.of(block);
  return {
    owner,
    fenced,
    fence: state.block_fence[block],
    shared: state.block_refs[block] > 1,
    cached: (flags & FLAGS.CACHED) > 0,
    loading: (flags & FLAGS.LOADING) > 0,
    saving: (flags & (FLAGS.SAVING | FLAGS.KEPT)) > 0,
    writes,
    stale: (flags & FLAGS.STALE) > 0,
  };
}

function drawBlock(ctx, map, state, writing, block, x, y, size) {
  const look = lookOf(state, writing, block), { theme, store } = map;
  drawCell(ctx, theme, look, x, y, size);
  if (store.request >= 0 && look.owner !== store.request) {
    ctx.fillStyle = theme.paper;
    ctx.globalAlpha = 0.62;
    ctx.fillRect(x, y, size, size);
    ctx.globalAlpha = 1;
  }
  if (size >= LABELS_FROM) labelBlock(ctx, map, look, block, x, y, size);
}

function drawCell(ctx, theme, look, x, y, size) {
  if (look.owner < 0) {
    ctx.fillStyle = theme.paper2;
    ctx.fillRect(x, y, size, size);
    if (size >= 12) frame(ctx, theme.line, x, y, size, 1);
    if (look.cached) cornerDots(ctx, theme, x, y, size);
  } else {
    ctx.fillStyle = requestFill(ctx, theme, look.owner, look.fenced);
    ctx.fillRect(x, y, size, size);
    if (look.fenced) drawFence(ctx, theme, x, y, size);
  }
  if (look.loading) arrow(ctx, theme, x, y, size, 1);
  else if (look.saving) arrow(ctx, theme, x, y, size, -1);
  if (look.writes) pen(ctx, look.stale ? theme.alarm : theme.ink, theme.paper, x, y, size);
  if (look.stale) frame(ctx, theme.alarm, x, y, size, 2);
}

function cornerDots(ctx, theme, x, y, size) {
  const r = Math.max(1.5, size / 24), step = size / 4;
  ctx.fillStyle = theme.ink2;
  ctx.globalAlpha = 0.5;
  for (let i = 1; i <= 3; i++) for (let j = 1; j <= 3; j++) ctx.fillRect(x + i * step - r / 2, y + j * step - r / 2, r, r);
  ctx.globalAlpha = 1;
}

function drawFence(ctx, theme, x, y, size) {
  frame(ctx, theme.ink, x, y, size, 1, [2, 2]);
  if (size >= ROOMY_FROM) drawPosts(ctx, theme, x + size - 26, y + 3, 10);
  else drawPosts(ctx, theme, x + size * 0.2, y + size * 0.56, size * 0.6);
}

function drawPosts(ctx, theme, x, y, width) {
  const post = width >= 8 ? 2 : 1, height = width * 0.6;
  ctx.fillStyle = theme.ink;
  for (let i = 0; i < 3; i++) ctx.fillRect(x + ((width - post) * i) / 2, y, post, height);
  ctx.fillRect(x, y + height * 0.35, width, post / 2 + 0.5);
}

function frame(ctx, colour, x, y, size, width, dash = []) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
  ctx.setLineDash([]);
}

/** A filled corner: a step in flight writes here. */
function pen(ctx, colour, paper, x, y, size) {
  const side = Math.max(4, Math.min(12, size * 0.38));
  ctx.beginPath();
  ctx.moveTo(x + size, y);
  ctx.lineTo(x + size, y + side);
  ctx.lineTo(x + size - side, y);
  ctx.closePath();
  ctx.fillStyle = colour;
  ctx.fill();
  ctx.strokeStyle = paper;
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(x + size, y + side);
  ctx.lineTo(x + size - side, y);
  ctx.stroke();
}

function arrow(ctx, theme, x, y, size, direction) {
  const cx = x + size / 2, cy = y + size / 2, reach = size * 0.24 * direction;
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = Math.max(1.5, size / 16);
  ctx.beginPath();
  ctx.moveTo(cx, cy - reach);
  ctx.lineTo(cx, cy + reach);
  ctx.moveTo(cx - size * 0.16, cy + reach - size * 0.16 * direction);
  ctx.lineTo(cx, cy + reach);
  ctx.lineTo(cx + size * 0.16, cy + reach - size * 0.16 * direction);
  ctx.stroke();
}

function labelBlock(ctx, map, look, block, x, y, size) {
  const { theme, store } = map;
  const onColour = look.owner >= 0 && !look.fenced && (store.request < 0 || store.request === look.owner);
  const back = onColour ? requestColour(look.owner) : null, ink = onColour ? inkOn(look.owner) : theme.ink;
  const isSmall = size < ROOMY_FROM, px = isSmall ? 10 : 12;
  ctx.textBaseline = "top";
  if (look.owner >= 0) {
    const name = shorten(store.history.requests[look.owner].id, Math.floor((size - 2) / (px * 0.58)));
    const middle = isSmall && look.fenced ? y + 5 : look.fenced || isSmall ? y + size * 0.36 : y + size / 2 - 5;
    ctx.textAlign = "center";
    plate(ctx, name, `600 ${px}px ${theme.font}`, x + size / 2, middle - (isSmall ? 2 : 0), back, ink);
  }
  if (isSmall) return;
  ctx.textAlign = "left";
  plate(ctx, `${block}`, `10px ${theme.font}`, x + 3, y + 3, back, ink);
  const notes = [];
  if (look.fenced) notes.push(`until ${look.fence}`);
  else if (look.writes) notes.push(stepsOf(look.writes, size < 58 ? "" : "step "));
  if (look.shared) notes.push("shared");
  ctx.textAlign = "right";
  if (notes.length) plate(ctx, shorten(notes.join(" "), Math.floor(size / 5.5)), `10px ${theme.font}`, x + size - 3, y + size - 14, back, ink);
}

/** "step 7" or "step 7–9". */
function stepsOf(writes, word) {
  const first = writes[0].step, last = writes[writes.length - 1].step;
  return first === last ? `${word}${first}` : `${word}${first}–${last}`;
}

/** Text on a plate of its own, so that a pattern does not disturb it. */
function plate(ctx, text, font, x, y, back, ink) {
  ctx.font = font;
  if (back) {
    const width = ctx.measureText(text).width + 4;
    const left = ctx.textAlign === "center" ? x - width / 2 : ctx.textAlign === "right" ? x - width + 2 : x - 2;
    ctx.fillStyle = back;
    ctx.fillRect(left, y - 1, width, font.includes("12px") ? 14 : 12);
  }
  ctx.fillStyle = ink;
  ctx.fillText(text, x, y);
}

// ---- ten thousand blocks: straight into pixels

function drawPixels(map, state, writing) {
  const { sheet, grid } = map, colours = pixelColours(map);
  const edge = (number) => Math.round(number * grid.size * sheet.scale);
  const width = edge(grid.columns), height = edge(Math.ceil(grid.count / grid.columns));
  if (map.image?.width !== width || map.image.height !== height) map.image = sheet.ctx.createImageData(width, height);
  const pixels = new Uint32Array(map.image.data.buffer);
  const gap = grid.size * sheet.scale > 3.5 ? 1 : 0;
  const lefts = Int32Array.from({ length: grid.columns + 1 }, (_, column) => edge(column));
  const owners = state.block_owner, flags = state.block_flags, { marks } = writing, { request } = map.store;
  const { FENCED } = FLAGS;
  pixels.fill(0);
  for (let row = 0, block = 1; block <= grid.count; row++) {
    const top = edge(row), bottom = edge(row + 1) - gap, line = top * width, middle = ((top + bottom) >> 1) * width;
    const first = block, end = Math.min(grid.count + 1, block + grid.columns);
    for (; block < end; block++) {
      const column = block - first, until = line + lefts[column + 1] - gap;
      const colour = pixelOf(colours, request, owners[block] - 1, flags[block]);
      for (let at = line + lefts[column]; at < until; at++) pixels[at] = colour;
    }
    for (let y = top + 1; y < bottom; y++) pixels.copyWithin(y * width, line, line + width);
    for (block = first; block < end; block++) {
      if (!marks[block] && !(flags[block] & FENCED)) continue;
      const column = block - first, centre = middle + ((lefts[column] + lefts[column + 1] - gap) >> 1);
      pixels[centre] = marks[block] ? colours.ink : colours.ink2;
    }
  }
  sheet.ctx.putImageData(map.image, 0, 0);
}

function pixelOf(colours, request, owner, flags) {
  if (owner < 0) return flags & FLAGS.CACHED ? colours.cached : colours.free;
  const shade = owner % colours.full.length;
  if (request >= 0 && owner !== request) return colours.dimmed[shade];
  return flags & FLAGS.FENCED ? colours.faded[shade] : colours.full[shade];
}

function pixelColours(map) {
  const { theme } = map;
  if (map.colours?.of === theme.patterns) return map.colours;
  const pack = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const shade = (colour, share) => pack(toRgb(mix(colour, theme.paper, share))) >>> 0;
  map.colours = {
    of: theme.patterns,
    free: pack(toRgb(theme.paper2)) >>> 0,
    cached: shade(theme.ink2, 0.6),
    ink: pack(toRgb(theme.ink)) >>> 0,
    ink2: pack(toRgb(theme.ink2)) >>> 0,
    full: LAB.palette.map((colour) => shade(colour, 0)),
    faded: LAB.palette.map((colour) => shade(colour, 0.6)),
    dimmed: LAB.palette.map((colour) => shade(colour, 0.8)),
  };
  return map.colours;
}

function drawLens(ctx, map, state, writing) {
  const block = map.hovered > 0 ? map.hovered : document.activeElement === map.sheet.canvas ? map.store.block : -1;
  if (block < 1) return;
  const { grid, sheet, theme } = map, { cell, columns, rows } = LENS;
  const width = columns * cell + 8, height = rows * cell + 8;
  const [bx, by] = cellOf(grid, block);
  const x = Math.max(0, Math.min(sheet.width - width, bx - width / 2));
  const y = by > height + 14 ? by - height - 10 : Math.min(sheet.height - height, by + 16);
  ctx.fillStyle = theme.paper;
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = 1;
  ctx.fillRect(x, y, width, height);
  ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  const row0 = Math.floor((block - 1) / grid.columns), column0 = (block - 1) % grid.columns;
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const row = row0 + r - (rows >> 1), column = column0 + c - (columns >> 1);
      const near = row * grid.columns + column + 1;
      if (column < 0 || column >= grid.columns || row < 0 || near > grid.count) continue;
      const [cx, cy] = [x + 4 + c * cell, y + 4 + r * cell];
      drawBlock(ctx, map, state, writing, near, cx, cy, cell - 2);
      if (near === block) frame(ctx, theme.accent, cx - 1, cy - 1, cell, 2);
    }
  }
}

// ---- pointing, clicking, keys

function followPointer(map) {
  const { sheet, store } = map, canvas = sheet.canvas;
  const blockOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return map.grid ? blockAt(map.grid, event.clientX - box.left, event.clientY - box.top) : -1;
  };
  const hover = (block) => {
    if (block === map.hovered) return;
    map.hovered = block;
    store.invalidate();
  };
  canvas.addEventListener("pointermove", (event) => hover(blockOf(event)));
  canvas.addEventListener("pointerleave", () => hover(-1));
  canvas.addEventListener("focus", () => store.invalidate());
  canvas.addEventListener("blur", () => store.invalidate());
  canvas.addEventListener("click", (event) => {
    const block = blockOf(event);
    if (block > 0) store.select({ block: block === store.block ? -1 : block });
  });
}

function moveCursor(map, by) {
  const { store, grid } = map;
  if (!grid) return;
  const block = store.block < 1 ? 1 : store.block + by;
  if (block >= 1 && block <= grid.count) store.select({ block });
}

// ---- words

function describeBlock(store, state, writing, block) {
  const look = lookOf(state, writing, block), { history } = store, name = (index) => history.requests[index].id;
  const parts = [`block ${block}`];
  if (look.owner < 0) parts.push(look.cached ? "free, its content can still be found" : "free");
  else if (look.fenced) parts.push(`let go by ${name(look.owner)}, waits until the fence reaches ${look.fence}`);
  else parts.push(`held by ${name(look.owner)}${look.shared ? ` and ${plural(state.block_refs[block] - 1, "other")}` : ""}`);
  if (look.owner >= 0 && look.cached) parts.push("cached");
  if (!look.fenced && look.fence) parts.push(`another has let it go and waits for ${look.fence}`);
  if (look.loading) parts.push("being loaded");
  if (look.saving) parts.push("being saved");
  for (const { step, request } of look.writes ?? []) {
    parts.push(look.stale && request !== look.owner ? `step ${step} still writes ${name(request)}'s tokens here`
      : `step ${step} writes ${request === look.owner ? "it" : `it for ${name(request)}`}`);
  }
  return parts.join(" · ");
}

/** Chips, one for each time the block changed hands. */
function showLineage(element, map, block) {
  const { store, theme } = map, { history } = store;
  const key = `${block}/${history.numFrames}/${store.generation}`;
  if (element.shownKey !== key) {
    element.shownKey = key;
    element.periods = block > 0 ? history.lineage(block) : [];
    element.replaceChildren(...element.periods.map((period) => lineageChip(history, theme, period, store)));
  }
  const now = element.periods.findIndex((period) => period.from <= store.position && store.position < period.to);
  if (element.shownNow === `${key}/${now}`) return;
  element.shownNow = `${key}/${now}`;
  [...element.children].forEach((chip, i) => chip.setAttribute("aria-current", String(i === now)));
  const chip = element.children[now];
  if (chip) element.scrollLeft = chip.offsetLeft - element.clientWidth / 2 + chip.offsetWidth / 2;
}

function lineageChip(history, theme, { owner, fence, cached, from, to }, store) {
  const steps = history.frames.step, last = history.numFrames - 1;
  const first = steps.at(from), until = steps.at(Math.min(to, last));
  const when = to > last ? `from step ${first}` : first === until ? `step ${first}` : `steps ${first}–${until}`;
  const who = owner ? history.requests[owner - 1].id : cached ? "free, cached" : "free";
  const label = fence ? `behind fence ${fence}` : who;
  const chip = el("button", { class: "lab-chip", title: `${fence ? `${who}: ` : ""}${label}, ${when}`, tabindex: "-1" },
    el("span", { class: "lab-chip-name", text: label }), el("span", { class: "lab-chip-when", text: when }));
  if (owner) chip.prepend(swatch(theme, owner - 1));
  chip.addEventListener("click", () => store.moveTo(from));
  return chip;
}

// ---- legend

function showLegend(legend, theme) {
  const sample = 3;
  const looks = {
    free: { owner: -1 }, cached: { owner: -1, cached: true }, held: { owner: sample },
    writing: { owner: sample, writes: [{ request: sample }] }, fenced: { owner: sample, fenced: true },
    loading: { owner: sample, loading: true }, saving: { owner: sample, saving: true },
    stale: { owner: sample, writes: [{ request: sample }], stale: true },
  };
  legend.replaceChildren(...LEGEND.map(([name, text]) => {
    const canvas = el("canvas", { width: 32, height: 32, class: "lab-sign", "aria-hidden": "true" });
    const ctx = canvas.getContext("2d");
    ctx.scale(2, 2);
    drawCell(ctx, theme, looks[name], 0, 0, 16);
    return el("span", {}, canvas, text);
  }));
}

export default { render };
