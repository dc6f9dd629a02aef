"use strict";
// A table that is wider than its place says that it scrolls.
function sayWhatScrolls() {
  for (const place of document.querySelectorAll(".table-wrapper.container")) {
    const note = place.previousElementSibling?.classList.contains("scrolls") ? place.previousElementSibling : null;
    const scrolls = place.scrollWidth > place.clientWidth + 1;
    if (scrolls && !note) {
      place.before(Object.assign(document.createElement("p"), { className: "scrolls", textContent: "The table scrolls →" }));
    } else if (!scrolls && note) note.remove();
  }
}
sayWhatScrolls();
addEventListener("resize", sayWhatScrolls);
