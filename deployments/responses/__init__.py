"""OpenAI's Responses API, `/v1/responses`: its bodies, answers and events, and the responses that are kept."""
