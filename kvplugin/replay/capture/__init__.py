"""A capture on disk and in memory: records, manifest, writer, reader."""
