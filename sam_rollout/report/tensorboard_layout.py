"""Writes our sections and panels as the layout of TensorBoard's tab "custom scalars"."""

import re
import time
from collections.abc import Iterable
from pathlib import Path

from sam_rollout.report.panels import SECTIONS, Panel
from sam_rollout.telemetry.records import RunFolderError


def write_layouts(runs: Iterable[Path]) -> list[Path]:
    """Add the layout to the TensorBoard folder of each run; a later layout replaces it.

    Returns:
        The TensorBoard folders.

    Raises:
        RunFolderError: A run has no TensorBoard folder.
    """
    folders = [run / "tensorboard" for run in runs]
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(
                f"no folder {folder}: the run did not log to TensorBoard (trainer.logger)"
            )
        _write(folder)
    return folders


def _write(log_dir: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=section.title,
                chart=[
                    layout_pb2.Chart(
                        title=panel.title,
                        multiline=layout_pb2.MultilineChartContent(tag=tags(panel)),
                    )
                    for panel in section.panels
                    if not panel.picture  # TensorBoard shows pictures in the tab "images"
                ],
            )
            for section in SECTIONS
        ]
    )
    writer = EventFileWriter(str(log_dir), filename_suffix=".layout")
    # tensorboard's own function for this needs TensorFlow.
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME)
    value = Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG,
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()]),
    )
    writer.add_event(Event(wall_time=time.time(), summary=Summary(value=[value])))
    writer.close()


def tags(panel: Panel) -> list[str]:
    """Return regular expressions for a panel's tags; TensorBoard matches whole tags."""
    return [panel.pattern] if panel.pattern else [f"^{re.escape(name)}$" for name in panel.metrics]
