"""The live dashboard, the figures and the report; the only folder that knows widget and chart libraries."""
