"""Is it on?"""

from __future__ import annotations

from kvplugin.dashboards.panel import Kind, Panel, Query, Row, Unit

ROW = Row(
    "Is it on?",
    (
        Panel(
            "Policy hook",
            "Whether the policy's hook is in place, by instance, and the reason if it is not. Anything but on where a "
            "policy is configured means that the model runs as without the plugin.",
            (Query('kvplugin_active{instance=~"$instance"}', "{{instance}}: {{reason}}"),),
            Unit.COUNT,
            Kind.STATE,
            below=1,
            words=((0, "off"), (1, "on")),
        ),
        Panel(
            "Kill switch",
            "Whether the arms' policies are in force. Pulled: every arm selects as without the plugin, running "
            "requests too. Somebody, or a guard, did that on purpose; the override's note says why.",
            (Query('kvplugin_rollout_enabled{instance=~"$instance"}', "{{instance}}"),),
            Unit.COUNT,
            Kind.STATE,
            below=1,
            words=((0, "pulled"), (1, "released")),
        ),
        Panel(
            "Versions",
            "What is installed. Instances that differ while no deployment is under way compare two programs, not two "
            "arms.",
            (
                Query(
                    'count by (version, vllm_version, torch_version) (kvplugin_build_info{instance=~"$instance"})',
                    "kvplugin {{version}}, vLLM {{vllm_version}}, torch {{torch_version}}",
                ),
            ),
            Unit.COUNT,
            Kind.STATE,
        ),
        Panel(
            "Rows",
            "Query tokens that the policy saw, once per index group. Zero under traffic means that the hook does not "
            "run; every other panel is then empty too.",
            (
                Query(
                    "sum by (phase) (rate(kvplugin_policy_rows_total"
                    '{outcome="seen", arm=~"$arm", instance=~"$instance"}[$__rate_interval]))',
                    "{{phase}}",
                ),
            ),
            Unit.PER_SECOND,
        ),
        Panel(
            "What became of the rows",
            "Share of the rows whose selection was rewritten, was right as it was, or was left alone. Bypassed rows "
            "get no structure: the Faults row says why. Identity alone means that rows fit the budget, or that the "
            "indexer finds the structure by itself.",
            (
                Query(
                    "sum by (outcome) (rate(kvplugin_policy_rows_total"
                    '{outcome=~"rewritten|identity|bypassed", arm=~"$arm", instance=~"$instance"}[$__rate_interval]))'
                    " / on () group_left () sum (rate(kvplugin_policy_rows_total"
                    '{outcome="seen", arm=~"$arm", instance=~"$instance"}[$__rate_interval]))',
                    "{{outcome}}",
                ),
            ),
            Unit.SHARE,
        ),
        Panel(
            "Rollout changes",
            "How often the rollout in force has changed since the engine started. Steps that nobody made on purpose "
            "come from a file that something rewrites; a fall to 1 is a restart.",
            (Query('kvplugin_rollout_generation{instance=~"$instance"}', "{{instance}}"),),
            Unit.COUNT,
        ),
    ),
)
