"""The operator: makes a cluster from a DisaggregatedService, keeps it so, scales, upgrades and drains it."""
