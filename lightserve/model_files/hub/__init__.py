"""Models by name: fetches what is missing from the Hugging Face hub into its cache."""

from lightserve.model_files.hub.model import HubModel, open_model
from lightserve.model_files.hub.name import HubName, parse_hub_name

__all__ = ["HubModel", "HubName", "open_model", "parse_hub_name"]
