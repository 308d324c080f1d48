"""The form in which a job's answers are written: its endpoint's, with what the body asked for on top."""

from __future__ import annotations

from deployments.openai_format import Format
from deployments.schemas import Job
from deployments.token_details import DetailedFormat
from deployments.tools import ToolFormat, may_call


def form_of(form: Format, job: Job) -> Format:
    """An endpoint's format, with tool calls read out of answers and tokens told where the job asks for it.

    Args:
        form: of the endpoint.
        job: its calls ask for the same.
    """
    if may_call(job.calls[0]):
        form = ToolFormat(form)
    return DetailedFormat(form) if job.calls[0].sampling.token_details else form
