"""A folder's metadata made true to its tensors: config.json, index, ignore lists, receipt. Weights are
never written."""
