// Queues: who runs, loads, waits and is done, with the numbers that decide. Only the rows in sight exist.

const ROW_HEIGHT = 21;
const SECTIONS = [
  ["running", "Running", "in order of admission; the last one is the first victim under FCFS"],
  ["loading", "Waiting, with blocks", "a load is under way or has just landed"],
  ["waiting", "Waiting", "the first one is admitted first"],
  ["finished", "Finished", ""],
];
const COLUMNS = [
  ["request", "request"],
  ["tokens", "computed / known"],
  ["given", "now"],
  ["flight", "in flight"],
  ["blocks", "blocks"],
  ["preemptions", "preempted"],
  ["priority", "prio"],
];
const COLUMN_TITLES = {
  tokens: "tokens whose KV is computed or scheduled, of all known tokens",
  given: "tokens given by the newest step",
  flight: "steps in flight with this request (a ring: output from before its preemption)",
  blocks: "blocks in its table",
  preemptions: "times it was preempted",
  priority: "priority; smaller goes first",
};

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-queues");
  const aside = el("span", { class: "lab-aside" });
  const list = el("div", { class: "lab-rows" });
  const scroller = el("div", {
    class: "lab-scroller", role: "grid", "aria-label": "requests by queue", "aria-multiselectable": "false",
  }, headRow(), list);
  root.append(el("div", { class: "lab-panel" }, el("div", { class: "lab-title" }, "Requests", aside), scroller));
  const theme = new Theme(root, () => rows.forEach((row) => (row.shown = null)) || store.invalidate(), signal);
  const rows = [];
  // height, top: of the part in sight. Asking the page for them in the midst of drawing would make it lay out twice.
  const view = { store, theme, scroller, list, rows, lines: [], height: 0, top: 0 };
  takeKeys(scroller, store, {
    ArrowUp: () => moveSelection(view, -1),
    ArrowDown: () => moveSelection(view, 1),
    Escape: () => store.select({ request: -1 }),
  });
  const measure = () => {
    view.height = scroller.clientHeight;
    view.top = scroller.scrollTop;
  };
  scroller.addEventListener("scroll", () => {
    measure();
    showRows(view, store.lastState);
  }, { passive: true });
  const observer = new ResizeObserver(() => {
    measure();
    store.invalidate();
  });
  observer.observe(scroller);
  signal.addEventListener("abort", () => observer.disconnect());
  let revealed = -1;
  store.view((state) => {
    store.lastState = state;
    view.lines = listLines(state, store);
    setText(aside, store.request < 0 ? "click one to follow it" : `following ${requestName(store, store.request)}`);
    if (view.shownLines !== view.lines.length) {
      view.shownLines = view.lines.length;
      list.style.height = `${view.lines.length * ROW_HEIGHT}px`;
      scroller.setAttribute("aria-rowcount", String(view.lines.length + 1));
    }
    if (view.height && store.request !== revealed) reveal(view, (revealed = store.request));
    showRows(view, state);
  }, signal);
}

function requestName(store, index) {
  return store.history.requests[index].id;
}

function headRow() {
  return el("div", { class: "lab-row lab-head", role: "row" }, ...COLUMNS.map(([name, label]) =>
    el("span", { class: `lab-cell lab-${name}`, role: "columnheader", text: label, title: COLUMN_TITLES[name] ?? "" })));
}

/** What stands in the list, from top to bottom: {section} or {request}. */
function listLines(state, store) {
  const { requests } = store.history;
  const members = { running: [], loading: [], waiting: [], finished: [] };
  for (let i = 0; i < requests.length; i++) {
    const queue = state.queue[i];
    if (queue === QUEUE_RUNNING) members.running.push(i);
    else if (queue === QUEUE_LOADING) members.loading.push(i);
    else if (queue === QUEUE_WAITING) members.waiting.push(i);
    else if (state.status[i]) members.finished.push(i);
  }
  const byPriority = store.history.head.config.policy === "priority";
  const early = (a, b) => state.ticket[a] - state.ticket[b];
  members.running.sort(early);
  for (const name of ["loading", "waiting"]) members[name].sort(byPriority ? (a, b) => byTurn(requests, a, b) : early);
  members.finished.reverse();
  const lines = [];
  for (const [name, title, hint] of SECTIONS) {
    if (!members[name].length && name === "loading") continue;
    lines.push({ section: title, count: members[name].length, hint });
    for (const request of members[name]) lines.push({ request });
  }
  return lines;
}

function byTurn(requests, a, b) {
  const [x, y] = [requests[a], requests[b]];
  return x.priority - y.priority || x.arrival - y.arrival || (x.id < y.id ? -1 : 1);
}

function showRows(view, state) {
  const { list, rows, lines } = view;
  const first = Math.max(0, Math.min(Math.floor(view.top / ROW_HEIGHT), lines.length) - 1);
  const needed = Math.min(lines.length - first, Math.ceil(view.height / ROW_HEIGHT) + 2);
  while (rows.length < needed) rows.push(new RequestRow(view));
  rows.forEach((row, i) => {
    const line = i < needed ? lines[first + i] : null;
    if (!line) return row.hide();
    row.show(line, first + i, state, view);
    if (!row.element.isConnected) list.append(row.element);
  });
}

/** One element, used again for whatever line is in its place. Touches the page only where something has changed. */
class RequestRow {
  constructor(view) {
    this.cells = Object.fromEntries(COLUMNS.map(([name]) => [name, el("span", { class: `lab-cell lab-${name}`, role: "gridcell" })]));
    this.swatch = el("canvas", { class: "lab-swatch", width: 24, height: 24, "aria-hidden": "true" });
    this.name = el("span", { class: "lab-name" });
    this.cells.request.append(this.swatch, this.name);
    this.bar = el("span", { class: "lab-bar", "aria-hidden": "true" }, el("i"), el("i"));
    this.tokens = el("span");
    this.cells.tokens.append(this.bar, this.tokens);
    this.head = el("span", { class: "lab-section" });
    this.element = el("div", { class: "lab-row", role: "row" }, this.head, ...Object.values(this.cells));
    this.element.addEventListener("click", () => {
      if (this.request >= 0) view.store.select({ request: view.store.request === this.request ? -1 : this.request });
    });
    this.shown = null;
  }

  hide() {
    this.element.hidden = true;
    this.shown = null;
  }

  show(line, number, state, view) {
    const top = number * ROW_HEIGHT;
    if (this.top !== top) this.element.style.transform = `translateY(${(this.top = top)}px)`;
    this.element.hidden = false;
    this.request = line.request ?? -1;
    const isSection = this.request < 0;
    this.element.classList.toggle("lab-is-section", isSection);
    this.element.setAttribute("aria-rowindex", String(number + 2));
    if (isSection) {
      setText(this.head, `${line.section} ${line.count}`);
      this.head.title = line.hint;
      this.shown = null;
      this.element.removeAttribute("aria-selected");
      return;
    }
    const chosen = view.store.request === this.request;
    this.element.setAttribute("aria-selected", String(chosen));
    if (this.shown !== this.request) this.showHead(view);
    this.showNumbers(state, view.store.history);
  }

  showHead(view) {
    const head = view.store.history.requests[this.request];
    this.shown = this.request;
    paintSwatch(this.swatch, view.theme, this.request);
    setText(this.name, head.id);
    this.name.title = head.id;
    setText(this.cells.priority, String(head.priority));
  }

  showNumbers(state, history) {
    const r = this.request, head = history.requests[r], all = head.prompt + head.maxTokens;
    const computed = state.computed[r], known = state.known[r];
    const done = state.status[r] >= LAB.firstFinished;
    setText(this.tokens, done ? `${known}` : `${computed} / ${known}`);
    this.element.title = `${head.id}: ${done ? "finished, " : ""}${LAB.statusNames[state.status[r]]}, prompt ${head.prompt}, output ${known - head.prompt} of at most ${head.maxTokens}`;
    this.bar.firstChild.style.width = `${(100 * known) / all}%`;
    this.bar.lastChild.style.width = `${(100 * Math.min(computed, all)) / all}%`;
    setText(this.cells.given, state.given[r] ? `+${state.given[r]}` : "");
    setText(this.cells.flight, state.steps[r] ? "●".repeat(state.steps[r]) : state.stale[r] ? "○" : "");
    setText(this.cells.blocks, done && !state.blocks[r] ? LAB.statusNames[state.status[r]] : String(state.blocks[r]));
    setText(this.cells.preemptions, state.preemptions[r] ? `${state.preemptions[r]}×` : "");
  }
}

function moveSelection(view, direction) {
  const { store, lines } = view;
  const order = lines.filter((line) => line.request !== undefined).map((line) => line.request);
  if (!order.length) return;
  const at = order.indexOf(store.request);
  const next = at < 0 ? (direction > 0 ? 0 : order.length - 1) : Math.max(0, Math.min(order.length - 1, at + direction));
  store.select({ request: order[next] });
}

function reveal(view, request) {
  const at = view.lines.findIndex((line) => line.request === request);
  if (at < 0) return;
  const top = at * ROW_HEIGHT, { scroller } = view, room = view.height - 2 * ROW_HEIGHT;
  if (top < view.top) scroller.scrollTop = view.top = top;
  else if (top > view.top + room) scroller.scrollTop = view.top = top - room;
}

export default { render };
