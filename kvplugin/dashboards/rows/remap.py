"""Remap."""

from __future__ import annotations

from kvplugin.dashboards.panel import Panel, Query, Row, Unit

_CONVERSIONS = 'kvplugin_remap_conversions_total{instance=~"$instance"}[$__rate_interval]'
_FALLBACKS = 'kvplugin_remap_conversions_total{path="fallback", instance=~"$instance"}[$__rate_interval]'

ROW = Row(
    "Remap",
    (
        Panel(
            "Layers by path",
            "How layers came by their physical indices. Memo reads what the group's leader converted and costs "
            "nothing; per_layer alone means that remap.grouped is off, or that no layers share a top-k.",
            (Query(f"sum by (path) (rate({_CONVERSIONS}))", "{{path}}"),),
            Unit.PER_SECOND,
        ),
        Panel(
            "Fallbacks",
            "Share of the layers that converted for themselves because their leader's result could not be used. Above "
            "0 the answers stay right and the saving is lost; the log says why, once.",
            (Query(f"sum (rate({_FALLBACKS})) / sum (rate({_CONVERSIONS}))", "fallback"),),
            Unit.SHARE,
            above=0,
        ),
        Panel(
            "Invalid slots",
            "Indices without a row in the KV pool, by reason; they are left out of attention. Must be 0: anything else "
            "is a fault in the block table, or upstream of it.",
            (
                Query(
                    'sum by (reason) (rate(kvplugin_remap_invalid_total{instance=~"$instance"}[$__rate_interval]))',
                    "{{reason}}",
                ),
            ),
            Unit.PER_SECOND,
            above=0,
        ),
    ),
)
