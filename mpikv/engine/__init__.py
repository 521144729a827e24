"""Everything that is under way in a store, and the engine that moves it on."""
