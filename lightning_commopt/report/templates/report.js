"use strict";

(function () {
  const opposite = { ascending: "descending", descending: "ascending" };

  function compare(a, b, order) {
    if (a === "" || b === "") {
      return (a === "") - (b === ""); // what has no value comes last either way
    }
    const isNumber = !Number.isNaN(Number(a)) && !Number.isNaN(Number(b));
    const difference = isNumber ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
    return order === "ascending" ? difference : -difference;
  }

  function sort(header, order) {
    const body = header.closest("table").tBodies[0];
    const rows = Array.from(body.rows);
    rows.forEach((row, index) => { row.dataset.place ??= index; });
    const value = (row) => row.cells[header.cellIndex].dataset.value;
    rows.sort((a, b) => (order === "none" ? 0 : compare(value(a), value(b), order)) || a.dataset.place - b.dataset.place);
    body.append(...rows);
    for (const other of header.parentElement.cells) {
      other.setAttribute("aria-sort", other === header ? order : "none");
    }
  }

  // The best first, then the worst first, then the order of the sweep.
  for (const button of document.querySelectorAll("thead button")) {
    const header = button.closest("th");
    button.addEventListener("click", () => {
      const now = header.getAttribute("aria-sort");
      const first = button.dataset.first;
      sort(header, now === "none" ? first : now === first ? opposite[first] : "none");
    });
  }
})();

(function () {
  function select(element) {
    const range = document.createRange();
    range.selectNodeContents(element);
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  }

  async function copy(element) {
    select(element); // stays when copying is not allowed, so that the keyboard can do it
    try {
      await navigator.clipboard.writeText(element.textContent);
      return true;
    } catch {
      return document.execCommand("copy");
    }
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", async () => {
      const done = await copy(document.getElementById(button.dataset.copy));
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
})();
