"""Contains the programs behind every number in README and docs; results/ has their records."""
