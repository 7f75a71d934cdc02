-- Of rocprofv3 --output-format json: a table for each list of records, with the number of their process; a column's name
-- is where its values are in a record.  A kernel and its call have the same correlation_id.internal, and so have a range
-- and its message.

-- reads kernel_dispatch: process start_timestamp! end_timestamp! correlation_id.internal stream_id.handle dispatch_info.queue_id.handle dispatch_info.agent_id.handle dispatch_info.kernel_id!
-- reads memory_copy: process start_timestamp! end_timestamp! correlation_id.internal stream_id.handle dst_agent_id.handle src_agent_id.handle kind operation
-- reads hip_api: process start_timestamp! end_timestamp! correlation_id.internal thread_id kind operation
-- reads marker_api: process start_timestamp! end_timestamp! correlation_id.internal thread_id
-- reads kernel_symbols: process kernel_id! formatted_kernel_name kernel_name
-- reads agents: process id.handle! type product_name logical_node_type_id cu_count gfx_target_version
-- reads operations: process kind operation name
-- reads messages: process key value
-- reads metadata: process node.machine_id node.hostname

CREATE TEMP VIEW gpus AS
SELECT process, "id.handle" AS agent, product_name AS name, logical_node_type_id AS device, cu_count AS units,
    gfx_target_version AS version
FROM agents WHERE type = 2;

CREATE TEMP VIEW kernels AS
SELECT start_timestamp AS start, COALESCE(end_timestamp, -1) AS "end",
    CAST(COALESCE(NULLIF(formatted_kernel_name, ''), kernel_name, 'unnamed kernel') AS TEXT) AS name, K.process AS process,
    COALESCE(device, -1) AS device, COALESCE("stream_id.handle", "dispatch_info.queue_id.handle", -1) AS stream,
    COALESCE("correlation_id.internal", -1) AS correlation
FROM kernel_dispatch K
    LEFT JOIN kernel_symbols S ON S.kernel_id = "dispatch_info.kernel_id" AND S.process = K.process
    LEFT JOIN gpus G ON G.agent = "dispatch_info.agent_id.handle" AND G.process = K.process;

CREATE TEMP VIEW copies AS
SELECT start_timestamp AS start, COALESCE(end_timestamp, -1) AS "end",
    CASE WHEN O.name LIKE '%HOST_TO_DEVICE' THEN 'Memcpy HtoD' WHEN O.name LIKE '%DEVICE_TO_HOST' THEN 'Memcpy DtoH'
        WHEN O.name LIKE '%DEVICE_TO_DEVICE' THEN 'Memcpy DtoD' ELSE 'Memcpy' END AS name,
    C.process AS process, COALESCE(D.device, S.device, -1) AS device, COALESCE("stream_id.handle", -1) AS stream,
    COALESCE("correlation_id.internal", -1) AS correlation
FROM memory_copy C
    LEFT JOIN operations O ON O.kind = C.kind AND O.operation = C.operation AND O.process = C.process
    LEFT JOIN gpus D ON D.agent = "dst_agent_id.handle" AND D.process = C.process
    LEFT JOIN gpus S ON S.agent = "src_agent_id.handle" AND S.process = C.process;

CREATE TEMP VIEW sets AS SELECT * FROM copies WHERE 0;  -- are kernels: __amd_rocclr_fillBufferAligned

CREATE TEMP VIEW calls AS
SELECT start_timestamp AS start, COALESCE(end_timestamp, -1) AS "end", O.name AS name, C.process AS process,
    COALESCE(thread_id, -1) AS tid, COALESCE("correlation_id.internal", -1) AS correlation
FROM hip_api C LEFT JOIN operations O ON O.kind = C.kind AND O.operation = C.operation AND O.process = C.process;

CREATE TEMP VIEW ranges AS
SELECT start_timestamp AS start, COALESCE(end_timestamp, -1) AS "end", CAST(M.value AS TEXT) AS name,
    R.process AS process, COALESCE(thread_id, -1) AS tid
FROM marker_api R JOIN messages M ON M.key = "correlation_id.internal" AND M.process = R.process;

CREATE TEMP VIEW hosts AS SELECT COUNT(DISTINCT "node.machine_id") AS n FROM metadata;

CREATE TEMP VIEW about AS
SELECT "node.hostname" AS host, 0 AS base, NULL AS rank, NULL AS world_size, process FROM metadata;

CREATE TEMP VIEW devices AS
SELECT name, units AS numSms, version / 10000 AS computeMajor, version / 100 % 100 AS computeMinor FROM gpus
ORDER BY agent NOT IN (SELECT "dispatch_info.agent_id.handle" FROM kernel_dispatch), agent;

CREATE TEMP VIEW others AS SELECT NULL AS name, -1 AS process WHERE 0;
