"""Tools for tests of deltastore and of new tiers: contract suites, faults, power loss. The library never needs them."""
