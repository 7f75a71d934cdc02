-- Of rocprofv3 --output-format csv and of `rocpd convert`: a table for each file.  The first versions tell no stream of a
-- kernel, whose queue stands for it.  A kernel and its call have the same Correlation_Id.  `rocpd convert` writes several
-- processes into one file, which their Guid tells apart.

-- reads kernel_trace: Guid Kernel_Name! Start_Timestamp! End_Timestamp! Agent_Id Queue_Id Stream_Id Correlation_Id
-- reads memory_copy_trace: Guid Direction! Start_Timestamp! End_Timestamp! Source_Agent_Id Destination_Agent_Id Stream_Id Correlation_Id
-- reads hip_api_trace: Guid Function! Start_Timestamp! End_Timestamp! Thread_Id Correlation_Id
-- reads marker_api_trace: Guid Function! Start_Timestamp! End_Timestamp! Thread_Id
-- reads agent_info: Guid Node_Id Logical_Node_Id Agent_Type Cu_Count Gfx_Target_Version Name Product_Name

CREATE TEMP TABLE processes AS
SELECT Guid, ROW_NUMBER() OVER () - 1 AS process FROM (SELECT DISTINCT Guid FROM kernel_trace WHERE Guid IS NOT NULL);

-- In other files one is 4, 'Agent 4' or, by --agent-index=type-relative, 'GPU 2'
CREATE TEMP TABLE gpus AS
SELECT DISTINCT Logical_Node_Id AS agent, DENSE_RANK() OVER (ORDER BY Node_Id) - 1 AS device,
    COALESCE(NULLIF(Product_Name, ''), Name) AS name, Cu_Count AS units, Gfx_Target_Version AS version
FROM agent_info WHERE Agent_Type = 'GPU';

CREATE TEMP VIEW kernels AS
SELECT Start_Timestamp AS start, COALESCE(NULLIF(End_Timestamp, ''), -1) AS "end",
    CAST(COALESCE(Kernel_Name, 'unnamed kernel') AS TEXT) AS name, COALESCE(process, -1) AS process,
    COALESCE(device, CAST(ltrim(Agent_Id, 'AgentGPU -') AS INTEGER), -1) AS device,
    COALESCE(Stream_Id, Queue_Id, -1) AS stream, COALESCE(Correlation_Id, -1) AS correlation
FROM kernel_trace LEFT JOIN processes USING (Guid) LEFT JOIN gpus ON agent = ltrim(Agent_Id, 'Agent -');

CREATE TEMP VIEW copies AS
SELECT Start_Timestamp AS start, COALESCE(NULLIF(End_Timestamp, ''), -1) AS "end",
    CASE WHEN Direction LIKE '%HOST_TO_DEVICE' THEN 'Memcpy HtoD' WHEN Direction LIKE '%DEVICE_TO_HOST' THEN 'Memcpy DtoH'
        WHEN Direction LIKE '%DEVICE_TO_DEVICE' THEN 'Memcpy DtoD' ELSE 'Memcpy' END AS name,
    COALESCE(process, -1) AS process, COALESCE(D.device, S.device, -1) AS device, COALESCE(Stream_Id, -1) AS stream,
    COALESCE(Correlation_Id, -1) AS correlation
FROM memory_copy_trace LEFT JOIN processes USING (Guid)
    LEFT JOIN gpus D ON D.agent = ltrim(Destination_Agent_Id, 'Agent -')
    LEFT JOIN gpus S ON S.agent = ltrim(Source_Agent_Id, 'Agent -');

CREATE TEMP VIEW sets AS SELECT * FROM copies WHERE 0;  -- are kernels: __amd_rocclr_fillBufferAligned

CREATE TEMP VIEW calls AS
SELECT Start_Timestamp AS start, COALESCE(NULLIF(End_Timestamp, ''), -1) AS "end", CAST(Function AS TEXT) AS name,
    COALESCE(process, -1) AS process, COALESCE(Thread_Id, -1) AS tid, COALESCE(Correlation_Id, -1) AS correlation
FROM hip_api_trace LEFT JOIN processes USING (Guid);

-- Beside the ranges, there are the calls of roctx that name none, such as roctxGetThreadId
CREATE TEMP VIEW ranges AS
SELECT Start_Timestamp AS start, COALESCE(NULLIF(End_Timestamp, ''), -1) AS "end", CAST(Function AS TEXT) AS name,
    COALESCE(process, -1) AS process, COALESCE(Thread_Id, -1) AS tid
FROM marker_api_trace LEFT JOIN processes USING (Guid) WHERE Function NOT LIKE 'roctx%';

CREATE TEMP VIEW hosts AS SELECT 1 AS n;

CREATE TEMP VIEW about AS SELECT NULL AS host, 0 AS base, NULL AS rank, NULL AS world_size, -1 AS process;

CREATE TEMP VIEW devices AS
SELECT name, units AS numSms, version / 10000 AS computeMajor, version / 100 % 100 AS computeMinor FROM gpus
ORDER BY device NOT IN (SELECT device FROM kernels), device;

CREATE TEMP VIEW others AS SELECT NULL AS name, -1 AS process WHERE 0;
