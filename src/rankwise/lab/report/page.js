"use strict";
// Draws the charts after the words of the page are on the screen, and lets the controls change them.
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const views = {};

  function rows(name) {
    const columns = content.datasets[name];
    const names = Object.keys(columns);
    for (const key of names) {
      const { words, places } = columns[key];
      if (words) columns[key] = places.map((place) => words[place]);
    }
    return columns[names[0]].map((_, i) => Object.fromEntries(names.map((key) => [key, columns[key][i]])));
  }

  function datasetsOf(spec) {
    const found = new Set();
    JSON.stringify(spec, (key, value) => {
      if (key === "data" && value && value.name) found.add(value.name);
      return value;
    });
    // each view gets rows of its own: Vega writes into them
    return Object.fromEntries([...found].map((name) => [name, rows(name)]));
  }

  async function draw(figure, place, element) {
    const spec = content.figures[figure][place];
    const options = {
      renderer: "svg", actions: false, ast: true, config: content.config, mode: "vega-lite",
      tooltip: { theme: "custom" },
    };
    const made = await vegaEmbed(element, { ...spec, datasets: datasetsOf(spec) }, options);
    (views[figure] ||= []).push(made.view);
    element.dataset.drawn = "yes";
  }

  function set(view, name, value) {
    try {
      view.signal(name, value);
    } catch {
      return; // a chart without this parameter
    }
    view.runAsync();
  }

  function wire() {
    const boxes = [...document.querySelectorAll(".filters input")];
    const filter = () => {
      const shown = boxes.filter((box) => box.checked).map((box) => box.value);
      Object.values(views).flat().forEach((view) => set(view, "shown", shown));
    };
    boxes.forEach((box) => box.addEventListener("change", filter));
    for (const figure of document.querySelectorAll("[data-figure]")) {
      for (const control of figure.querySelectorAll("[data-signal]")) {
        const apply = () => {
          const value = control.type === "range" ? Number(control.value) : control.value;
          (views[figure.dataset.figure] || []).forEach((view) => set(view, control.dataset.signal, value));
        };
        control.addEventListener("input", apply);
        control.reapply = apply;
      }
    }
    return () => {
      if (boxes.some((box) => !box.checked)) filter();
      document.querySelectorAll("[data-signal]").forEach((control) => control.reapply());
    };
  }

  function remember() {
    // a page that loads itself again stands as the reader left it
    const inputs = [...document.querySelectorAll(".filters input, [data-signal], details")];
    const key = "rankwise " + location.pathname;
    try {
      const states = JSON.parse(sessionStorage.getItem(key) || "null");
      if (states && states.length === inputs.length) {
        inputs.forEach((input, i) => {
          if (input.type === "checkbox") input.checked = states[i];
          else if (input.tagName === "DETAILS") input.open = states[i];
          else if (states[i] !== null) input.value = states[i];
        });
      }
    } catch { /* storage may be forbidden for local files */ }
    return () => {
      const states = inputs.map((input) =>
        input.type === "checkbox" ? input.checked : input.tagName === "DETAILS" ? input.open
          // a slider at its end stays at the end of a longer training
          : input.type === "range" && input.value === input.max ? null : input.value);
      try { sessionStorage.setItem(key, JSON.stringify(states)); } catch { /* as above */ }
    };
  }

  function copyable() {
    for (const button of document.querySelectorAll(".copy")) {
      button.addEventListener("click", async () => {
        const code = button.parentElement.querySelector("code");
        try {
          await navigator.clipboard.writeText(code.textContent);
          button.textContent = "Copied";
        } catch {
          getSelection().selectAllChildren(code);
          button.textContent = "Selected";
        }
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
    }
  }

  async function main() {
    const keep = remember();
    const reapply = wire();
    copyable();
    if (content.reload) setTimeout(() => { keep(); location.reload(); }, 1000 * content.reload);
    const library = document.createElement("script");
    library.textContent = document.getElementById("library").textContent;
    document.head.append(library);
    for (const figure of document.querySelectorAll("[data-figure]")) {
      for (const element of figure.querySelectorAll("[data-chart]")) {
        await draw(figure.dataset.figure, Number(element.dataset.chart), element);
        await new Promise((resolve) => setTimeout(resolve));
      }
    }
    reapply();
    document.documentElement.dataset.drawn = "yes";
  }

  requestAnimationFrame(() => setTimeout(main));
})();
