/* What the browser does by itself with the page: at once, or as gradio's events call it by its name,
   with what they have. */
{
  const field = (id) => document.querySelector(`#${id} :is(textarea, input)`);
  const isOpen = (id) => document.getElementById(id)?.classList.contains("open");
  const toggle = (id) => document.querySelector(`#${id} .toggle-button`)?.click();
  // Beside the conversation there is room for two panels, for one or, as on a phone, for none. What is
  // closed for want of room comes back with it.
  const SIDES = ["side", "conversations"];
  const room = () => (innerWidth > 768) + (innerWidth >= 1100);
  const folded = new Set();
  let before = 2;
  const fit = () => {
    const open = SIDES.filter(isOpen);
    const kept = [...open, ...folded].slice(0, before = room());
    for (const id of kept) if (!isOpen(id)) toggle(id);
    for (const id of open) if (!kept.includes(id)) fold(id);
  };
  const fold = (id) => {
    toggle(id);
    folded.add(id);
  };
  // A model stays where it lies: the server looks for it by its name and size.
  const offer = (model, dropped) => {
    document.getElementById("model")?.click();
    dropped.value = JSON.stringify([model.name, model.size, Date.now()]);
    dropped.dispatchEvent(new Event("input", { bubbles: true }));
  };
  addEventListener("resize", () => room() !== before && fit());
  document.addEventListener("click", (event) => {
    const id = event.target.closest?.(".toggle-button")?.parentElement.id;
    const other = SIDES.find((each) => each !== id);
    if (!id) return;
    folded.delete(id);
    if (!isOpen(id) && isOpen(other) && room() < 2) fold(other);
  }, true);
  let files = "";
  let newest = null; // of the lists of conversations

  // Figures that are unfolded choose their answer, like a click on it.
  const unfold = (event) => {
    event.target.closest?.("#chat .thought-group > .title")?.closest("[data-testid=bot]")?.click();
  };
  document.addEventListener("click", unfold, true);
  document.addEventListener("keydown", (event) => event.key === "Enter" && unfold(event), true);

  // A document that is opened at a passage shows that passage.
  document.addEventListener("toggle", (event) => {
    const box = event.target.querySelector?.(":scope > .document"), mark = box?.querySelector("mark");
    if (!mark || !event.target.open) return;
    box.scrollTop = mark.offsetTop - (box.clientHeight - mark.offsetHeight) / 2;
    box.scrollIntoView({ block: "nearest" });
  }, true);

  // Gradio copies an answer with its account; its Markdown alone is in its label. Where an address is
  // not secure there is no clipboard, and gradio copies what it has selected.
  let answer = null;
  document.addEventListener("click", (event) => {
    const row = event.target.closest?.("#chat .message-buttons-left")?.previousElementSibling;
    const said = [...row?.querySelectorAll("[data-testid=bot]:not(:has(.thought-group, .sources))") ?? []];
    if (!said.length) return;
    const texts = said.map((each) => each.ariaLabel.slice(each.ariaLabel.indexOf(": ") + 2));
    answer = texts.join("\n").replaceAll("\u2060", "");
    setTimeout(() => answer = null);
  }, true);
  // Escape ends what is being done, but for a menu or a dialog, which it closes.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    if (!document.querySelector(":popover-open, dialog[open]"))
      document.querySelector("#box .stop-button")?.click();
  });
  const clipboard = navigator.clipboard, write = clipboard?.writeText.bind(clipboard);
  if (clipboard) clipboard.writeText = (text) => write(answer ?? text);
  document.addEventListener("copy", (event) => {
    if (answer === null) return;
    event.clipboardData.setData("text/plain", answer);
    event.preventDefault();
  });

  // Gradio takes files that are dropped on its box alone; elsewhere a browser would leave the page to
  // open them.
  const carries = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => carries(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    const model = [...event.dataTransfer?.files ?? []].find((each) => /\.gguf$/i.test(each.name));
    const offered = model && field("model-dropped");
    if (!carries(event) || (event.target.closest?.("#box") && !offered)) return;
    event.preventDefault();
    if (offered) {
      event.stopPropagation();
      return offer(model, offered);
    }
    const input = document.querySelector("#box input[type=file]");
    input.files = event.dataTransfer.files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }, true);

  window.kvlite = {
    fit,
    // What is said next belongs to the conversation that was chosen last, whenever the server hears of
    // it; and on a phone the list is in the way then.
    choose: (id, ...others) => {
      field("here").value = id;
      field("here").dispatchEvent(new Event("input"));
      if (!room() && isOpen("conversations")) toggle("conversations");
      return [id, ...others];
    },
    begin: (_, ...others) => {
      const bytes = [...crypto.getRandomValues(new Uint8Array(16))];
      const id = bytes.map((each) => each.toString(16).padStart(2, "0")).join("");
      return kvlite.choose(id, ...others);
    },
    // Of a document that waits in the box gradio shows only that there is one.
    name: (said) => {
      setTimeout(() => document.querySelectorAll("#box .thumbnail-item").forEach((each, at) => {
        each.title = said?.files?.[at]?.orig_name ?? "";
        each.parentElement.ariaLabel = each.title;
      }));
      return [];
    },
    // Files in the box are read before they are sent, and forgotten if they are taken out of it.
    keepUp: (said) => {
      const now = (said?.files ?? []).map((each) => each.path).join("\n");
      if (now !== files) setTimeout(() => document.getElementById("keep-up")?.click());
      files = now;
      return [];
    },
    // What could not be read leaves the box, whatever was typed meanwhile.
    refuse: (gone, said) => {
      const paths = gone.split("\n"), sent = said?.files ?? [];
      return { ...said, files: sent.filter((each) => !paths.includes(each.path)) };
    },
    // Of lists that come in another order than they were asked for, the newest stays: of this query,
    // but for a clock that was set back.
    list: (listed) => {
      const [at, query, html] = JSON.parse(listed), last = newest?.at ?? 0;
      const old = last - 60 < at && at < last;
      if (!last || (!old && query === (field("search")?.value ?? ""))) newest = { at, html };
      return newest.html;
    },
    // A conversation has an address of its own, which a tab goes back to, and gives the tab its title.
    address: (kept, ...others) => {
      window.onhashchange = () => location.reload();
      return [location.hash.slice(1) || kept, ...others];
    },
    title: (id, name) => {
      document.title = name ? `${name} · kvlite` : "kvlite";
      const at = id ? "#" + id : location.pathname, left = location.hash && location.hash !== at;
      history[left ? "pushState" : "replaceState"](null, "", at);
      document.dispatchEvent(new Event("kvlite:shown")); // which list.js hears
      return [];
    },
    // What is sent before the page knows which conversation it shows waits until it does; after half a
    // minute it begins a new one.
    arrive: async (id, ...others) => {
      for (let left = 600; left && !(id ||= field("here")?.value); left--)
        await new Promise((go) => setTimeout(go, 50));
      return [id, ...others];
    },
    showSide: () => {
      if (!isOpen("side")) toggle("side");
      return [];
    },
    // It saves a text as a file without leaving the machine.
    save: (text, name) => {
      if (!text) return [text, name];
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
      link.download = name;
      link.click();
      URL.revokeObjectURL(link.href);
      return ["", ""];
    },
  };
}
