"""The pictures of docs/dashboards.md, from the first pair of the recorded runs.

    python -m benchmarks.dashboard_pictures

`benchmarks/dapo_ab.py` records the runs below benchmarks/results/runs.
"""

from benchmarks.measuring import REPOSITORY, RESULTS
from benchmarks.recorded_comparison import RUNS
from sam_rollout.report.pictures import draw_sections

PICTURES = REPOSITORY / "docs" / "images" / "dashboard"


def main() -> None:
    """Draw every section of the dashboard."""
    runs = RESULTS / RUNS
    for path in draw_sections([runs / "off-1", runs / "on-1"], PICTURES):
        print(path)


if __name__ == "__main__":
    main()
