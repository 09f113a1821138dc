"""The golden traces' workshop: the slow oracle, the families of cases, the generator, and adapters for others."""
