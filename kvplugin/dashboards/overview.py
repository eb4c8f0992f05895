"""The one dashboard."""

from __future__ import annotations

from kvplugin.dashboards.panel import Dashboard, Variable
from kvplugin.dashboards.rows import arms, faults, remap, selection, state

OVERVIEW = Dashboard(
    uid="kvplugin-overview",
    title="kvplugin",
    description="The topology policy, its arms, and what went wrong.",
    variables=(
        Variable("model", "Model", ("vllm:num_requests_running", "model_name")),
        Variable("instance", "Instance", ('vllm:num_requests_running{model_name=~"$model"}', "instance")),
        Variable("arm", "Arm", ('kvplugin_policy_rows_total{instance=~"$instance"}', "arm")),
        Variable(
            "baseline",
            "Baseline arm",
            ('kvplugin_policy_rows_total{instance=~"$instance"}', "arm"),
            many=False,
            prefer="control",
        ),
    ),
    rows=(state.ROW, selection.ROW, arms.ROW, remap.ROW, faults.ROW),
)
