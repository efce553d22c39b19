// Why panel: the decision of the step one looks at, in the kernel's sentences, with its numbers.

const ASK_AFTER_MS = 120;
const GOES_ON = ["The run goes on. Pause it to see why each request gets what it gets."];

async function render({ model, el: root, host, signal }) {
  const store = await openStore(model, host);
  root.classList.add("lab", "lab-why");
  const aside = el("span", { class: "lab-aside" });
  const list = el("ol", { class: "lab-sentences", tabindex: "0", "aria-label": "why each request got what it got" });
  root.append(el("div", { class: "lab-panel" }, el("div", { class: "lab-title" }, "Why", aside), list));
  takeKeys(list, store, { ArrowUp: () => (list.scrollTop -= 30), ArrowDown: () => (list.scrollTop += 30) });
  let timer = 0, shown = null, shownStep = -1;
  const goesOn = () => store.status.mode === "running" && store.atEnd;
  const show = () => {
    const lines = goesOn() ? GOES_ON : store.explanation();
    setText(aside, `step ${store.step}${lines ? "" : " …"}`);
    list.setAttribute("aria-busy", String(!lines));
    if (lines) shownStep = store.step;
    if (!lines || lines === shown) return;
    shown = lines;
    const sentences = lines.length ? lines : ["Nothing was decided here."];
    list.replaceChildren(...sentences.map((text) => el("li", { text })));
    list.scrollTop = 0;
  };
  store.view(() => {
    list.setAttribute("aria-busy", String(shownStep !== store.step));
    clearTimeout(timer);
    if (goesOn()) show();
    else timer = setTimeout(show, store.why.has(`${store.step}`) ? 0 : ASK_AFTER_MS);
  }, signal);
  signal.addEventListener("abort", () => clearTimeout(timer));
}

export default { render };
