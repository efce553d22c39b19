// Show: lays the views out; knows only that they are views.

async function render({ model, el: root, host, signal }) {
  root.classList.add("lab", "lab-show");
  root.dataset.layout = model.get("layout_name");
  const parts = Object.entries(model.get("parts"));
  const boxes = parts.map(([name]) => el("div", { class: "lab-part", style: { "grid-area": name } }));
  root.append(el("div", { class: "lab-grid" }, ...boxes));
  root.labStore = (await host.getWidget(model.get("hub"))).exports;
  await Promise.all(parts.map(async ([, reference], i) => {
    const box = el("div");
    boxes[i].append(box);
    await (await host.getWidget(reference)).render({ el: box, signal });
  }));
}

export default { render };
