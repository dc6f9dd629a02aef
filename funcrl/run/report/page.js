"use strict";
// What a run wrote is put into the page as text alone, never as HTML.

function make(tag, options, ...inside) {
  const element = Object.assign(document.createElement(tag), options);
  element.append(...inside);
  return element;
}

function read(id) {
  const element = document.getElementById(id);
  return element && JSON.parse(element.textContent);
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= Math.abs(steps[low] - step) ? low - 1 : low;
}

function followPointer(picture, panel) {
  const [left, top, right, bottom] = panel.box, [first, last] = panel.x;
  const at = make("div", { className: "at", hidden: true });
  const values = make("div", { className: "values", hidden: true });
  picture.append(at, values);
  // Lines that were drawn in another order of steps are searched in this one.
  for (const line of panel.lines) {
    const order = line.steps.map((_, index) => index).sort((a, b) => line.steps[a] - line.steps[b]);
    line.values = order.map((index) => line.values[index]);
    line.steps = order.map((index) => line.steps[index]);
  }
  picture.addEventListener("pointermove", (event) => {
    const frame = picture.querySelector("svg").getBoundingClientRect();
    const share = (event.clientX - frame.left) / frame.width;
    const wanted = first + (last - first) * (share - left) / (right - left);
    const found = panel.lines.filter((line) => line.steps.length).map((line) => {
      const index = nearest(line.steps, wanted);
      return { line, step: line.steps[index], value: line.values[index] };
    });
    if (!found.length) return;
    const gap = (each) => Math.abs(each.step - wanted);
    const step = found.reduce((best, each) => gap(each) < gap(best) ? each : best).step;
    const x = frame.width * (left + (right - left) * (step - first) / (last - first));
    at.style.left = `${x}px`;
    at.style.top = `${frame.height * top}px`;
    at.style.height = `${frame.height * (bottom - top)}px`;
    const title = step === 0 && panel.zero ? `step 0, ${panel.zero}` : `step ${step}`;
    values.replaceChildren(make("b", { textContent: title }));
    for (const each of found.slice(0, 12)) {
      const spot = make("i");
      spot.style.background = each.line.color;
      const where = each.step === step ? "" : ` (step ${each.step})`;
      values.append(make("div", {}, spot, `${each.line.label}: ${each.value}${where}`));
    }
    at.hidden = values.hidden = false;
    const room = frame.width - values.offsetWidth;
    values.style.left = `${Math.max(0, x + 10 <= room ? x + 10 : x - 10 - values.offsetWidth)}px`;
  });
  picture.addEventListener("pointerleave", () => { at.hidden = values.hidden = true; });
}

function listCompletions(place, { head, rows, texts }) {
  const PAGE = matchMedia("(max-width: 46rem)").matches ? 20 : 50;
  const isText = (column) => (column >= 1 && column <= texts) || column === head.length - 1;
  const numeric = head.map((_, column) => column).filter((column) => !isText(column));
  const input = (type, label) => make("input", { type, ariaLabel: label, placeholder: label, step: "any" });
  const choice = (columns, label) => make("select", { ariaLabel: label },
    ...columns.map((column) => make("option", { value: column, textContent: head[column] })));
  const search = input("search", "text");
  const [fromStep, toStep] = [input("number", "from"), input("number", "to")];
  const [low, high] = [input("number", "at least"), input("number", "at most")];
  const scores = numeric.filter((column) => column > 0);
  const which = choice(scores, "column to limit");
  const sortBy = choice(head.map((_, column) => column), "column to sort by");
  const falling = make("input", { type: "checkbox" });
  const filters = make("div", { className: "filters" },
    make("label", {}, "with the text ", search),
    make("label", {}, "steps ", fromStep, " ", toStep),
    make("label", {}, which, " ", low, " ", high),
    make("label", {}, "sort by ", sortBy),
    make("label", {}, falling, " largest first"));
  const count = make("p");
  const body = make("tbody");
  const more = make("button", { type: "button" });
  place.append(filters, count, make("div", { className: "wide" },
    make("table", { className: "list" }, body)), more);

  let found = rows, visible = PAGE;
  const within = (value, from, to) => {
    if (from.value === "" && to.value === "") return true;
    return value !== null && (from.value === "" || value >= +from.value)
      && (to.value === "" || value <= +to.value);
  };
  const cell = (value, column) => {
    const td = make("td", { className: isText(column) ? "long" : "n" });
    td.dataset.label = head[column];
    const shown = value === null ? "-" : String(value);
    if (column >= 1 && column <= texts) td.append(make("pre", { textContent: shown }));
    else td.textContent = shown;
    return td;
  };
  const scoreAt = texts + 1;
  // On a narrow page a row is this line, which opens it.
  const fold = (row) => {
    const textContent = `step ${row[0]}, ${head[scoreAt]} ${row[scoreAt] ?? "-"}: ${String(row[2]).trim().slice(0, 120)}`;
    const button = make("button", { type: "button", ariaExpanded: "false", textContent });
    button.addEventListener("click", () => {
      button.ariaExpanded = String(button.closest("tr").classList.toggle("open"));
    });
    return make("td", { className: "fold" }, button);
  };
  const draw = () => {
    body.replaceChildren(make("tr", { className: "head" },
      ...head.map((name) => make("th", { textContent: name }))));
    for (const row of found.slice(0, visible)) body.append(make("tr", {}, fold(row), ...row.map(cell)));
    count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} completions`;
    more.hidden = found.length <= visible;
    more.textContent = `Show ${Math.min(PAGE, found.length - visible)} more`;
  };
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);  // those without come last
    return (falling.checked ? -1 : 1) * (a < b ? -1 : a > b ? 1 : 0);
  };
  const filter = () => {
    const wanted = search.value.toLowerCase(), column = +sortBy.value;
    found = rows.filter((row) => within(row[0], fromStep, toStep)
      && within(row[+which.value], low, high)
      && (!wanted || row.some((value, place) => isText(place) && String(value).toLowerCase().includes(wanted))));
    found = found.slice().sort((a, b) => compare(a[column], b[column]));
    visible = PAGE;
    draw();
  };
  filters.addEventListener("input", filter);
  more.addEventListener("click", () => { visible += PAGE; draw(); });
  filter();
}

const panels = read("curves-data") || [];
for (const figure of document.querySelectorAll("figure[data-panel]")) {
  followPointer(figure.querySelector(".picture"), panels[+figure.dataset.panel]);
}
const completions = read("completions-data");
if (completions) listCompletions(document.getElementById("completions"), completions);
