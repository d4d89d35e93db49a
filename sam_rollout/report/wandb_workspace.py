"""Builds a workspace of Weights & Biases with the sections and panels of `panels.py`."""

from typing import TYPE_CHECKING, Any

from sam_rollout.report.panels import SECTIONS, Panel, Section

if TYPE_CHECKING:
    import wandb_workspaces.workspaces as ws

STEP_AXIS = "training/global_step"  # a metric that verl logs only in training steps
COLUMNS = 3
NAME = "SAM rollout"
PINNED = ("sam/engine/rollout_s", "sam/tail/time_s", "sam/draft/acceptance_length")


class DashboardError(Exception):
    """The workspace cannot be built or saved; the message says what to do."""


def build(entity: str, project: str, group: str = "") -> "ws.Workspace":
    """Build a workspace; `group` limits it to the runs of one comparison, grouped by side."""
    try:
        import wandb_workspaces.workspaces as ws
        from wandb_workspaces import expr
    except ImportError as error:
        raise DashboardError(
            f"{error}: install it with pip install 'sam_rollout[dashboard]'"
        ) from error

    columns = ["run:displayName", "run:jobType", *(f"summary:{name}.mean" for name in PINNED)]
    runs = ws.RunsetSettings(pinned_columns=columns)
    if group:
        runs.filters = expr.And(expr.Metric("Group") == group)
        runs.groupby = [expr.Metric("JobType")]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[_section(section, number == 0) for number, section in enumerate(SECTIONS)],
        settings=ws.WorkspaceSettings(x_axis=STEP_AXIS, max_runs=20),
        runset_settings=runs,
        auto_generate_panels=False,
    )


def _section(section: Section, first: bool) -> "ws.Section":
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    question = wr.MarkdownPanel(markdown=f"**{section.question}**\n\nLook first: the next panel.")
    return ws.Section(
        name=section.title,
        panels=[question, *(_panel(panel) for panel in section.panels)],
        is_open=True,
        pinned=first,
        layout_settings=ws.SectionLayoutSettings(columns=COLUMNS, rows=3),
        panel_settings=ws.SectionPanelSettings(x_axis=STEP_AXIS),
    )


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if panel.picture:
        return wr.MediaBrowser(
            title=panel.title, media_keys=[panel.picture], gallery_axis="step", num_columns=2
        )
    shown: dict[str, Any] = {"y": list(panel.metrics)}
    if panel.pattern:
        shown = {"metric_regex": panel.pattern}
    return wr.LinePlot(
        title=panel.title,
        x=STEP_AXIS,
        title_x="training step",
        title_y=panel.unit or None,
        range_y=(0 if panel.zero_based else None, None),
        **shown,
    )


def specification(workspace: "ws.Workspace") -> dict[str, Any]:
    """Return the workspace as plain JSON values, as it is sent to the server."""
    return workspace._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def save(workspace: "ws.Workspace") -> str:
    """Save the workspace on the server; return its address."""
    try:
        workspace.save()
    except Exception as error:  # an error of wandb, its GraphQL client or the connection
        raise DashboardError(
            f"the workspace cannot be saved ({type(error).__name__}: {error}); log in with "
            "wandb login, or write it to a file with --json"
        ) from error
    return workspace.url
